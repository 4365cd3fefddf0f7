#include "libddp/activation/replay_pass.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "libddp/autograd/version_of.h"

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

void ReplayPass::pack(const at::Tensor& tensor) {
  const std::size_t slot = num_packed_;
  if (slot >= limits_.num_slots) {
    num_packed_ += is_stopped_ ? 0 : 1;
    return;
  }
  ++num_packed_;
  if (is_wanted_(slot)) {
    versions_[slot] = version_of(tensor);
    tensors_[slot] = tensor;
    ++num_kept_;
  }
  is_stopped_ = limits_.stop_early && num_packed_ == limits_.num_slots;
}

ReplayPass::Taken ReplayPass::take(std::size_t slot) {
  if (slot >= tensors_.size() || !tensors_[slot].defined()) return {};
  --num_kept_;
  return {std::exchange(tensors_[slot], at::Tensor()), versions_[slot]};
}

}  // namespace libddp
