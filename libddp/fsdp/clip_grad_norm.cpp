#include "libddp/fsdp/clip_grad_norm.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "libddp/fsdp/wrapped_module.h"
#include "libddp/module/grad_norm.h"

namespace libddp {
namespace {

/// Gradients with one owner each, or with parts on all ranks of `group`.
struct GradientsOfGroup {
  Group group;
  std::vector<at::Tensor> gradients;
};

/// In the order of the parameters, which is the same on every rank, whatever gradients it has.
std::vector<GradientsOfGroup> gradients_by_group(const std::vector<at::Tensor>& parameters) {
  const auto owners = WrappedModule::owners();
  std::vector<GradientsOfGroup> all;
  for (const at::Tensor& parameter : parameters) {
    const auto owner = owners.find(parameter.unsafeGetTensorImpl());
    Group group = owner == owners.end() ? nullptr : owner->second;
    auto known = std::find_if(all.begin(), all.end(),
                              [&](const GradientsOfGroup& one) { return one.group == group; });
    if (known == all.end()) known = all.insert(all.end(), {std::move(group), {}});
    if (parameter.grad().defined()) known->gradients.push_back(parameter.grad());
  }
  return all;
}

}  // namespace

at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type) {
  const c10::NoGradGuard no_grad;
  const auto all = gradients_by_group(parameters);
  std::vector<at::Tensor> norms;
  for (const auto& [group, gradients] : all) {
    norms.push_back(norm_over_ranks(gradients, norm_type, group));
  }
  if (norms.empty()) return at::zeros({}, at::kFloat);
  const at::Tensor norm = at::linalg_vector_norm(at::stack(norms), norm_type);
  const at::Tensor factor = clip_factor(norm, max_norm);
  for (const auto& [group, gradients] : all) {
    for (at::Tensor gradient : gradients) gradient.mul_(factor);
  }
  return norm;
}

}  // namespace libddp
