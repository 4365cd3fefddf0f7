#include "libddp/module/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/any.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "libddp/module/device_grad_norm.h"

namespace libddp {
namespace {

at::Tensor scalar(double value) { return at::zeros({}, at::kDouble).fill_(value); }

/// Of this rank's gradients; undefined where it has no element of any.
at::Tensor norm_here(const std::vector<at::Tensor>& gradients, double norm_type,
                     std::optional<at::ScalarType> computed_in) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients) {
    // The largest of nothing is an error.
    if (!gradient.defined() || gradient.numel() == 0) continue;
    norms.push_back(at::linalg_vector_norm(gradient, norm_type, std::nullopt, false, computed_in));
  }
  return norms.empty() ? at::Tensor() : at::linalg_vector_norm(at::stack(norms), norm_type);
}

/// torch's norm of order 0: how many tensors, not elements, have a value other than 0.
at::Tensor count_nonzero(const RankGradients& of) {
  const at::Tensor has_any =
      at::zeros({static_cast<std::int64_t>(of.gradients.size())}, at::kDouble);
  double* const flags = has_any.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < of.gradients.size(); ++i) {
    const at::Tensor& gradient = of.gradients[i];
    flags[i] = gradient.defined() && gradient.numel() > 0 && at::any(gradient).item<bool>();
  }
  of.group->all_reduce(has_any, {ReduceOp::Max});
  return has_any.sum();
}

/// The largest, or for -infinity the smallest, of all ranks; NaN if one is, which Max may drop.
at::Tensor largest(const at::Tensor& here, double norm_type, const Group& group) {
  const double sign = std::copysign(1.0, norm_type);
  const double nothing = sign > 0 ? 0.0 : -std::numeric_limits<double>::infinity();
  const double own = here.defined() ? sign * here.item<double>() : nothing;
  const at::Tensor both = at::zeros({2}, at::kDouble);
  double* const values = both.mutable_data_ptr<double>();
  values[0] = std::isnan(own) ? nothing : own;
  values[1] = std::isnan(own);
  group->all_reduce(both, {ReduceOp::Max});
  return scalar(values[1] > 0 ? std::numeric_limits<double>::quiet_NaN() : sign * values[0]);
}

at::Tensor norm_over_ranks(const RankGradients& of, double norm_type,
                           std::optional<at::ScalarType> computed_in) {
  if (norm_type == 0) return count_nonzero(of);
  const at::Tensor here = norm_here(of.gradients, norm_type, computed_in);
  if (std::isinf(norm_type)) return largest(here, norm_type, of.group);
  const at::Tensor power = here.defined() ? here.to(at::kDouble).pow(norm_type) : scalar(0);
  of.group->all_reduce(power, {ReduceOp::Sum});
  return power.pow(1.0 / norm_type);
}

}  // namespace

at::Tensor total_norm(const std::vector<RankGradients>& all, double norm_type,
                      std::optional<at::ScalarType> computed_in) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const RankGradients& of : all) {
    if (!of.device.is_cpu()) {
      norms.push_back(device_grad_norm(of, norm_type, computed_in));
      continue;
    }
    if (of.group && of.group->size() > 1) {
      const at::Tensor norm = norm_over_ranks(of, norm_type, computed_in);
      norms.push_back(norm.to(computed_in.value_or(of.dtype)));
      continue;
    }
    at::Tensor norm = norm_here(of.gradients, norm_type, computed_in);
    norms.push_back(norm.defined() ? std::move(norm) : at::zeros({}, at::kFloat));
  }
  if (norms.empty()) return at::zeros({}, at::kFloat);
  for (at::Tensor& norm : norms) norm = norm.to(all.front().device, /*non_blocking=*/true);
  const at::Tensor each = at::stack(norms);
  return norm_type == 0 ? each.sum() : at::linalg_vector_norm(each, norm_type);
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  // As Python divides a number by a tensor, which rounds twice.
  return at::clamp((norm + 1e-6).reciprocal().mul_(max_norm), std::nullopt, 1.0);
}

void scale_gradients(const std::vector<at::Tensor>& gradients, const at::Tensor& factor) {
  const c10::NoGradGuard no_grad;
  std::map<c10::DeviceIndex, std::vector<at::Tensor>> on_devices;
  for (at::Tensor gradient : gradients) {
    if (!gradient.defined()) continue;
    if (gradient.device().is_cpu()) {
      gradient.mul_(factor);
    } else {
      on_devices[gradient.device().index()].push_back(gradient);
    }
  }
  for (auto& [index, list] : on_devices) {
    at::_foreach_mul_(list, factor.to(list.front().device(), /*non_blocking=*/true));
  }
}

}  // namespace libddp
