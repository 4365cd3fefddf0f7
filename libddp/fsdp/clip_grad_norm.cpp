#include "libddp/fsdp/clip_grad_norm.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "libddp/fsdp/wrapped_module.h"

namespace libddp {
namespace {

/// Gradients with one owner each, or with parts on all ranks of `group`.
struct GradientsOfGroup {
  Group group;
  std::vector<at::Tensor> gradients;
};

/// In the order of the parameters, which is the same on every rank.
std::vector<GradientsOfGroup> gradients_by_group(const std::vector<at::Tensor>& parameters) {
  const auto owners = WrappedModule::owners();
  std::vector<GradientsOfGroup> all;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    const auto owner = owners.find(parameter.unsafeGetTensorImpl());
    Group group = owner == owners.end() ? nullptr : owner->second;
    auto known = std::find_if(all.begin(), all.end(),
                              [&](const GradientsOfGroup& one) { return one.group == group; });
    if (known == all.end()) known = all.insert(all.end(), {std::move(group), {}});
    known->gradients.push_back(parameter.grad());
  }
  return all;
}

at::Tensor norm_of(const std::vector<at::Tensor>& tensors, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) {
    // Pieces may be empty, and the largest of nothing is an error.
    if (tensor.numel() > 0) norms.push_back(at::linalg_vector_norm(tensor, norm_type));
  }
  if (norms.empty()) return at::zeros({}, tensors.front().options());
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

/// The norm of what all ranks have together, from each rank's own.
at::Tensor across(at::Tensor norm, double norm_type, const Group& group) {
  if (!group || group->size() == 1) return norm;
  if (std::isinf(norm_type)) {
    group->all_reduce(norm, {ReduceOp::Max});
    return norm;
  }
  at::Tensor power = norm.to(at::kDouble).pow(norm_type);
  group->all_reduce(power, {ReduceOp::Sum});
  return power.pow(1.0 / norm_type).to(norm.scalar_type());
}

}  // namespace

at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type) {
  const c10::NoGradGuard no_grad;
  const auto all = gradients_by_group(parameters);
  std::vector<at::Tensor> norms;
  for (const auto& [group, gradients] : all) {
    norms.push_back(across(norm_of(gradients, norm_type), norm_type, group));
  }
  if (norms.empty()) return at::zeros({}, at::kFloat);
  const at::Tensor norm = at::linalg_vector_norm(at::stack(norms), norm_type);
  // As Python divides a number by a tensor, which rounds twice.
  const at::Tensor factor = at::clamp((norm + 1e-6).reciprocal().mul_(max_norm), std::nullopt, 1.0);
  for (const auto& [group, gradients] : all) {
    for (at::Tensor gradient : gradients) gradient.mul_(factor);
  }
  return norm;
}

}  // namespace libddp
