#pragma once

// Argument checks of the c10d methods, in the words of torch's Gloo backend: scripts and tests
// match those words. What the words mean is torch's (c10d/Utils.hpp); where and who is added here.
//
// Thread rule: made for one call, used by its thread.
//
//   C10dChecks checks(*group, "gather");
//   checks.root(opts.rootRank);
//   checks.single_input(inputs);

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

class C10dChecks {
 public:
  C10dChecks(const ProcessGroup& group, const char* operation)
      : group_(group), operation_(operation) {}

  /// Throws ArgumentError "libddp[group world, rank 0/2] gather: <what>".
  [[noreturn]] void fail(const std::string& what) const;

  void root(std::int64_t rank) const;
  void root_tensor(std::int64_t index, const Tensors& tensors) const;
  void single(const Tensors& tensors) const;
  void single_input(const Tensors& tensors) const;
  void single_output(const Tensors& tensors) const;
  /// Strided, on a device that the group moves; sparse COO too where `allow_sparse`.
  void layout(const Tensors& tensors, bool allow_sparse = false) const;
  /// Non-empty, one type, one shape.
  void alike(const Tensors& tensors) const;
  /// Non-empty, one type and device.
  void one_type(const Tensors& tensors) const;
  /// The lists of allgather: each output list has an entry per rank and input.
  void gathered(const TensorLists& outputs, const Tensors& inputs) const;
  /// The lists of allgather_coalesced: an output list per rank, an entry per input.
  void gathered_coalesced(const TensorLists& outputs, const Tensors& inputs) const;
  /// Sizes of all_to_all's parts of `tensor`; empty = equal ones.
  void splits(const std::vector<std::int64_t>& sizes, const at::Tensor& tensor) const;
  /// The lists of all_to_all; `which` = "input" or "output".
  void one_per_rank(const Tensors& tensors, const char* which) const;
  /// The lists of gather (`which` = "output") and scatter ("input"): one with an entry per rank on
  /// the root, none elsewhere.
  void rooted(const TensorLists& lists, const at::Tensor& like, bool is_root,
              const char* which) const;

 private:
  auto failing() const {
    return [this](const std::string& what) { fail(what); };
  }

  const ProcessGroup& group_;
  const char* const operation_;
};

}  // namespace libddp
