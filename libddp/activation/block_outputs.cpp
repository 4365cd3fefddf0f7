#include "libddp/activation/block_outputs.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "libddp/activation/checkpoint_error.h"

namespace libddp {
namespace {

bool is_among(const at::Tensor& tensor, const std::vector<at::Tensor>& others, std::size_t count) {
  return std::any_of(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(count),
                     [&](const at::Tensor& other) { return other.is_same(tensor); });
}

/// Whether nothing but the tensor's own storage holds its data, so that storages can be compared.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

bool may_share_memory(const at::Tensor& tensor, const at::Tensor& other) {
  if (!other.defined()) return false;
  return !is_plain(tensor) || !is_plain(other) || tensor.storage().is_alias_of(other.storage());
}

/// Another tensor with the same data, which autograd knows as a view.
at::Tensor view_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.layout() == at::kStrided ? tensor.view_as(tensor) : tensor.tensor_data();
}

bool is_transformed(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper,
                                          c10::DispatchKey::Functionalize});
  if (!tensor.defined()) return false;
  if (tensor.key_set().has_any(kWrapped)) return true;
  // Most have no tangent; to ask for one, or for that of a view's base, takes a lock.
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || (meta->fw_grad_ == nullptr && !meta->is_view_)) return false;
  return tensor._fw_grad(/*level=*/0).defined();  // the only level there is
}

}  // namespace

void BlockOutputs::adopt(const NodePointer& node, const std::vector<at::Tensor>& inputs,
                         std::vector<at::Tensor>& tensors,
                         const std::function<bool(const at::Tensor&)>& must_stay) {
  std::size_t num_differentiable = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& tensor = tensors[i];
    const bool is_differentiable =
        tensor.defined() && torch::autograd::isDifferentiableType(tensor.scalar_type());
    is_differentiable_.push_back(is_differentiable);
    if (!is_differentiable) continue;
    ++num_differentiable;
    // One tensor given twice stays one tensor; the node knows it as the latter output.
    if (!is_among(tensor, tensors, i)) tensor = own(inputs, tensors, i, must_stay);
    torch::autograd::create_gradient_edge(tensor, node);
  }
  // As torch does it for what a function of the user's gives: views may not be changed in place.
  using torch::autograd::CreationMeta;
  const CreationMeta made =
      num_differentiable > 1 ? CreationMeta::MULTI_OUTPUT_NODE : CreationMeta::IN_CUSTOM_FUNCTION;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_differentiable(i) || !tensors[i].is_view()) continue;
    torch::autograd::impl::get_view_autograd_meta(tensors[i])->set_creation_meta(made);
  }
}

at::Tensor BlockOutputs::own(const std::vector<at::Tensor>& inputs,
                             const std::vector<at::Tensor>& tensors, std::size_t i,
                             const std::function<bool(const at::Tensor&)>& must_stay) {
  const at::Tensor& tensor = tensors[i];
  const bool is_view = tensor.is_view();
  if (is_view && must_stay && must_stay(tensor)) return tensor;
  // What is there outside of the block has a history of its own, or may get one.
  if (tensor.requires_grad() || is_among(tensor, inputs, inputs.size()) ||
      (is_view && tensor._base().requires_grad())) {
    return view_of(tensor);
  }
  if (!is_view) return tensor;
  const auto shares = [&](const at::Tensor& other) { return may_share_memory(tensor, other); };
  if (std::any_of(inputs.begin(), inputs.end(), shares)) return tensor;
  for (std::size_t j = 0; j < tensors.size(); ++j) {
    if (j != i && shares(tensors[j])) return tensor;
  }
  const c10::VariableVersion& counter = torch::autograd::impl::version_counter(tensor);
  if (counter.enabled()) {
    sources_.push_back({i, decltype(Source::base)(tensor._base().getIntrusivePtr()), counter,
                        counter.current_version()});
  }
  return tensor.tensor_data();
}

void BlockOutputs::require_unchanged(const std::function<std::string()>& name) const {
  for (const Source& source : sources_) {
    // It usually went with the block's other tensors; then only the output has the memory.
    if (source.base.expired() || source.counter.current_version() == source.version) continue;
    throw CheckpointError(fmt::format(
        "libddp checkpoint of {}: output {} has been modified by an inplace operation, and it is a "
        "view of a tensor that is still there outside of the block's runs, so that a second run "
        "may see other values. Hint: clone the output before the change.",
        name(), source.output));
  }
}

void refuse_transforms(const std::vector<at::Tensor>& tensors,
                       const std::function<std::string()>& name) {
  if (std::none_of(tensors.begin(), tensors.end(), is_transformed)) return;
  throw ArgumentError(fmt::format(
      "libddp checkpoint of {}: a checkpoint that is one node of the graph (use_reentrant=True, "
      "checkpoint_module, libddp::checkpoint in C++) cannot be used below torch.func's transforms "
      "(vmap, grad, vjp, jvp, ...) nor with dual tensors of forward-mode AD: the block's second "
      "run, in backward, is outside of them. Hint: use the transform within the block, or "
      "use_reentrant=False where torch allows it.",
      name()));
}

}  // namespace libddp
