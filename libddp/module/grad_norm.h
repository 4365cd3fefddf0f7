#pragma once

// The norm of gradients of which each rank has a part. Thread rule: as the group's collectives.
//
//   at::Tensor norm = norm_over_ranks(own_parts, 2.0, group);   // a collective
//   const at::Tensor factor = clip_factor(norm, 1.0);
//   for (at::Tensor& gradient : gradients) gradient.mul_(factor);

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <optional>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// The norm of all `tensors` together; some may be empty.
inline at::Tensor norm_of_all(const std::vector<at::Tensor>& tensors, double norm_type) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) {
    // The largest of nothing is an error.
    if (tensor.numel() > 0) norms.push_back(at::linalg_vector_norm(tensor, norm_type));
  }
  if (!norms.empty()) return at::linalg_vector_norm(at::stack(norms), norm_type);
  return at::zeros({}, tensors.empty() ? at::TensorOptions(at::kFloat) : tensors[0].options());
}

/// The norm of what all ranks of `group` have together, the same on all of them; `norm_type` may be
/// infinity. A null group: of this rank's `own` alone.
inline at::Tensor norm_over_ranks(const std::vector<at::Tensor>& own, double norm_type,
                                  const Group& group) {
  const c10::NoGradGuard no_grad;
  at::Tensor norm = norm_of_all(own, norm_type);
  if (!group || group->size() == 1) return norm;
  if (std::isinf(norm_type)) {
    group->all_reduce(norm, {ReduceOp::Max});
    return norm;
  }
  const at::Tensor power = norm.to(at::kDouble).pow(norm_type);
  group->all_reduce(power, {ReduceOp::Sum});
  return power.pow(1.0 / norm_type).to(norm.scalar_type());
}

/// What gradients with this norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does.
inline at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  // As Python divides a number by a tensor, which rounds twice.
  return at::clamp((norm + 1e-6).reciprocal().mul_(max_norm), std::nullopt, 1.0);
}

}  // namespace libddp
