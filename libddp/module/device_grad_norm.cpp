#include "libddp/module/device_grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/any.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace libddp {
namespace {

at::TensorOptions doubles_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kDouble).device(device);
}

at::Tensor scalar_on(c10::Device device, double value) {
  return at::full({}, value, doubles_on(device));
}

/// Of this rank's gradients; undefined where it has no element of any.
at::Tensor own_norm(const std::vector<at::Tensor>& gradients, double norm_type,
                    std::optional<at::ScalarType> computed_in) {
  std::vector<at::Tensor> filled;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined() && gradient.numel() > 0) filled.push_back(gradient);
  }
  if (filled.empty()) return {};
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(filled, norm_type, computed_in)),
                                norm_type);
}

/// How many of the tensors have a value other than 0 on some rank.
at::Tensor count_filled(const RankGradients& of) {
  std::vector<at::Tensor> flags;
  for (const at::Tensor& gradient : of.gradients) {
    const bool has_any = gradient.defined() && gradient.numel() > 0;
    flags.push_back(has_any ? at::any(gradient).to(at::kDouble) : scalar_on(of.device, 0));
  }
  const at::Tensor all = at::stack(flags);
  of.group->all_reduce(all, {ReduceOp::Max});
  return all.sum();
}

/// The largest, or for -infinity the smallest, of all ranks; NaN if one is, which Max may drop.
at::Tensor largest_on_device(const at::Tensor& here, double norm_type, const RankGradients& of) {
  const double sign = std::copysign(1.0, norm_type);
  const at::Tensor nothing =
      scalar_on(of.device, sign > 0 ? 0.0 : -std::numeric_limits<double>::infinity());
  const at::Tensor own = here.defined() ? here.to(at::kDouble).mul(sign) : nothing;
  const at::Tensor is_nan = at::isnan(own);
  const at::Tensor both = at::stack({at::where(is_nan, nothing, own), is_nan.to(at::kDouble)});
  of.group->all_reduce(both, {ReduceOp::Max});
  const at::Tensor nan = scalar_on(of.device, std::numeric_limits<double>::quiet_NaN());
  return at::where(both[1] > 0, nan, both[0] * sign);
}

}  // namespace

at::Tensor device_grad_norm(const RankGradients& of, double norm_type,
                            std::optional<at::ScalarType> computed_in) {
  const at::ScalarType dtype = computed_in.value_or(of.dtype);
  const bool is_spread = of.group && of.group->size() > 1;
  if (is_spread && norm_type == 0) return count_filled(of).to(dtype);
  const at::Tensor here = own_norm(of.gradients, norm_type, computed_in);
  if (!is_spread) return here.defined() ? here : scalar_on(of.device, 0).to(at::kFloat);
  if (std::isinf(norm_type)) return largest_on_device(here, norm_type, of).to(dtype);
  const at::Tensor power =
      here.defined() ? here.to(at::kDouble).pow(norm_type) : scalar_on(of.device, 0);
  of.group->all_reduce(power, {ReduceOp::Sum});
  return power.pow(1.0 / norm_type).to(dtype);
}

}  // namespace libddp
