#include "libddp/ddp/low_precision.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "libddp/base/error.h"

namespace libddp {

LowPrecisionParameters::LowPrecisionParameters(const NamedTensors& parameters, at::ScalarType dtype)
    : dtype_(dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    throw ArgumentError(fmt::format(
        "libddp: mixed precision cannot compute in {}. Hint: use half or bfloat16 as param_dtype.",
        c10::toString(dtype)));
  }
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype) continue;
    parameters_.push_back(tensor);
    low_.push_back(at::empty_like(tensor.detach(), tensor.options().dtype(dtype)));
  }
  full_.resize(parameters_.size());
}

bool LowPrecisionParameters::lower() {
  if (is_low_) return false;
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    full_[i] = parameters_[i].detach();
    parameters_[i].set_data(low_[i]);
  }
  if (!low_.empty()) at::_foreach_copy_(low_, full_);
  is_low_ = true;
  if (on_change_) on_change_();
  return true;
}

void LowPrecisionParameters::raise() {
  if (!is_low_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(full_[i]);
    full_[i] = at::Tensor();
  }
  is_low_ = false;
  if (on_change_) on_change_();
}

}  // namespace libddp
