#include "libddp/activation/replay_pass.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "libddp/activation/checkpoint_error.h"
#include "libddp/activation/saved_input.h"

namespace libddp {

TensorKind TensorKind::of(const at::Tensor& tensor) {
  TensorKind kind;
  kind.dtype = tensor.scalar_type();
  kind.device = tensor.device();
  // Nested tensors and symbolic shapes have no plain sizes; what is left is compared.
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.is_nested() && !impl->has_symbolic_sizes_strides()) {
    const c10::IntArrayRef sizes = tensor.sizes();
    kind.sizes.assign(sizes.begin(), sizes.end());
  }
  return kind;
}

std::string TensorKind::text() const {
  return fmt::format("shape [{}], dtype {}, device {}", fmt::join(sizes, ", "),
                     c10::toString(dtype), device.str());
}

ReplayPass::ReplayPass(int task, Limits limits, std::function<bool(std::size_t)> is_wanted)
    : task_(task),
      limits_(limits),
      is_wanted_(std::move(is_wanted)),
      tensors_(limits.num_slots),
      versions_(limits.num_slots) {}

at::Tensor ReplayPass::pack(const at::Tensor& tensor) {
  at::Tensor plain = tensor.requires_grad() ? tensor.tensor_data() : tensor;
  const std::size_t slot = num_packed_;
  if (slot >= limits_.num_slots) {
    num_packed_ += is_stopped_ ? 0 : 1;
    return plain;
  }
  ++num_packed_;
  if (is_wanted_(slot)) {
    versions_[slot] = version_of(plain);
    tensors_[slot] = plain;
    ++num_kept_;
  }
  is_stopped_ = limits_.stop_early && num_packed_ == limits_.num_slots;
  return plain;
}

at::Tensor ReplayPass::take(std::size_t slot, const std::function<std::string()>& name) {
  if (slot >= tensors_.size() || !tensors_[slot].defined()) {
    throw CheckpointError(fmt::format(
        "libddp checkpoint of {}: Unpack is being triggered for a tensor that was already unpacked "
        "once (saved tensor {}). Hint: read ctx.saved_tensors once per backward.",
        name(), slot));
  }
  at::Tensor tensor = std::exchange(tensors_[slot], at::Tensor());
  --num_kept_;
  if (version_of(tensor) != versions_[slot]) {
    throw CheckpointError(fmt::format(
        "libddp checkpoint of {}: saved tensor {} has been modified by an inplace operation after "
        "it was saved: it is at version {}; expected version {}. Hint: the block computes a "
        "gradient from a tensor that it changes afterwards; clone the tensor first.",
        name(), slot, version_of(tensor), versions_[slot]));
  }
  return tensor;
}

void ReplayPass::drop(std::size_t slot) {
  if (slot >= tensors_.size() || !tensors_[slot].defined()) return;
  tensors_[slot].reset();
  --num_kept_;
}

}  // namespace libddp
