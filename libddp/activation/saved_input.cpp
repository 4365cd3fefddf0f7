#include "libddp/activation/saved_input.h"

#include <ATen/SavedTensorHooks.h>
#include <fmt/format.h>

#include "libddp/activation/checkpoint_error.h"
#include "libddp/activation/slot_scope.h"
#include "libddp/autograd/version_of.h"

namespace libddp {

SavedInput::SavedInput(const at::Tensor& tensor) {
  const bool has_hooks = SlotScope::innermost() != nullptr ||
                         !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
  if (has_hooks && !tensor.is_inference()) {
    packed_.emplace(tensor, /*is_output=*/false);
  } else {
    tensor_ = tensor;
    version_ = version_of(tensor);
  }
}

at::Tensor SavedInput::unpack(const std::function<std::string()>& name) const {
  if (packed_) return packed_->unpack();
  if (version_of(tensor_) != version_) {
    throw CheckpointError(fmt::format(
        "libddp checkpoint of {} has been modified by an inplace operation: it is at version {}; "
        "expected version {}. Recomputing the block from it would give other gradients. Hint: do "
        "not change a checkpointed block's inputs in place, neither in the block nor between "
        "forward and backward; clone the tensor first.",
        name(), version_of(tensor_), version_));
  }
  return tensor_;
}

}  // namespace libddp
