#include "libddp/interop/c10d_checks.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cctype>
#include <torch/csrc/distributed/c10d/Utils.hpp>

namespace libddp {

void C10dChecks::fail(const std::string& what) const {
  throw ArgumentError(fmt::format("libddp[group {}, rank {}/{}] {}: {}", group_.name(),
                                  group_.rank(), group_.size(), operation_, what));
}

void C10dChecks::root(std::int64_t rank) const {
  c10d::assertRootRank(failing(), rank, group_.size());
}

void C10dChecks::root_tensor(std::int64_t index, const Tensors& tensors) const {
  c10d::assertRootTensor(failing(), index, static_cast<std::int64_t>(tensors.size()));
}

void C10dChecks::single(const Tensors& tensors) const {
  c10d::assertSingleElement(failing(), tensors);
}

void C10dChecks::single_input(const Tensors& tensors) const {
  c10d::assertSingleElementInput(failing(), tensors);
}

void C10dChecks::single_output(const Tensors& tensors) const {
  c10d::assertSingleElementOutput(failing(), tensors);
}

void C10dChecks::layout(const Tensors& tensors, bool allow_sparse) const {
  for (const at::Tensor& tensor : tensors) {
    if (!group_.moves(tensor.device().type())) {
      fail(
          fmt::format("unsupported device type {}. Hint: CUDA tensors need a build of libddp with "
                      "CUDA (python -m libddp --version), and backend nccl",
                      tensor.device().str()));
    }
    if (tensor.layout() == at::kStrided || (allow_sparse && tensor.layout() == at::kSparse)) {
      continue;
    }
    fail("only supports dense tensors: unsupported layout");
  }
}

void C10dChecks::alike(const Tensors& tensors) const {
  c10d::assertNonEmpty(failing(), tensors);
  c10d::assertLayoutMatch(failing(), tensors);
  c10d::assertTypeAndSizesMatch(failing(), tensors);
}

void C10dChecks::one_type(const Tensors& tensors) const {
  c10d::assertNonEmpty(failing(), tensors);
  c10d::assertLayoutMatch(failing(), tensors);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.options().type_equal(tensors[0].options())) {
      fail("tensors must all have the same type");
    }
    if (tensor.device() != tensors[0].device()) fail("tensors must all be on the same device");
  }
}

void C10dChecks::gathered(const TensorLists& outputs, const Tensors& inputs) const {
  if (inputs.empty()) fail("requires non-empty input tensor list");
  if (inputs.size() != outputs.size()) {
    fail("requires input/output tensor lists to have the same length");
  }
  const std::size_t expected = inputs.size() * static_cast<std::size_t>(group_.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].size() != expected) {
      fail(fmt::format("invalid output tensor list at index {} (expected length {}, got {})", i,
                       expected, outputs[i].size()));
    }
    for (std::size_t j = 0; j < expected; ++j) {
      c10d::assertTypeMatch(failing(), inputs[0].options(), outputs[i], j);
    }
  }
  c10d::assertTypeAndSizesMatch(failing(), inputs, inputs[0].options(), inputs[0].sizes());
}

void C10dChecks::gathered_coalesced(const TensorLists& outputs, const Tensors& inputs) const {
  if (inputs.empty()) fail("requires non-empty input tensor list");
  if (outputs.size() != static_cast<std::size_t>(group_.size())) {
    fail("output lists should be equal to world size");
  }
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size()) {
      fail(fmt::format("invalid output size: (expected length {}, got {})", inputs.size(),
                       list.size()));
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (list[i].sizes() != inputs[i].sizes()) {
        fail(fmt::format("invalid size of output tensor at index {} (expected length {}, got {})",
                         i, c10d::toString(inputs[i].sizes()), c10d::toString(list[i].sizes())));
      }
      c10d::assertTypeMatch(failing(), inputs[i].options(), list, i);
    }
  }
}

void C10dChecks::splits(const std::vector<std::int64_t>& sizes, const at::Tensor& tensor) const {
  try {
    c10d::checkSplitSizes(sizes, tensor, group_.size());
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  }
}

void C10dChecks::one_per_rank(const Tensors& tensors, const char* which) const {
  if (tensors.size() == static_cast<std::size_t>(group_.size())) return;
  fail(fmt::format("{} tensor list size {} does not match world size {}", which, tensors.size(),
                   group_.size()));
}

void C10dChecks::rooted(const TensorLists& lists, const at::Tensor& like, bool is_root,
                        const char* which) const {
  if (!is_root) {
    if (!lists.empty()) fail(fmt::format("requires empty {} on non-root", which));
    return;
  }
  const auto size = static_cast<std::size_t>(group_.size());
  if (lists.size() != 1) {
    fail(fmt::format("requires a single-element {} list containing a list with {} tensors.", which,
                     size));
  }
  if (lists[0].size() != size) {
    const char first = static_cast<char>(std::toupper(static_cast<unsigned char>(which[0])));
    fail(
        fmt::format("Incorrect {} list size {}. {}{} list size should be {}, same as size of the "
                    "process group.",
                    which, lists[0].size(), first, which + 1, size));
  }
  c10d::assertTypeAndSizesMatch(failing(), lists[0], like.options(), like.sizes());
}

}  // namespace libddp
