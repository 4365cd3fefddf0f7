#include "libddp/fsdp/clip_grad_norm.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "libddp/fsdp/wrapped_module.h"
#include "libddp/module/each_once.h"
#include "libddp/module/grad_norm.h"

namespace libddp {
namespace {

/// In the order of the parameters, which is the same on every rank, whatever gradients it has.
std::vector<RankGradients> gradients_by_group(const std::vector<at::Tensor>& parameters,
                                              const Group& around) {
  const auto owners = WrappedModule::owners(around);
  std::vector<RankGradients> all;
  for (const at::Tensor& parameter : parameters) {
    const auto owner = owners.find(parameter.unsafeGetTensorImpl());
    const Group group = owner == owners.end() ? nullptr : owner->second;
    const c10::Device device = parameter.device();
    auto known = std::find_if(all.begin(), all.end(), [&](const RankGradients& one) {
      return one.group == group && one.device == device;
    });
    if (known == all.end()) {
      known = all.insert(all.end(), {group, parameter.scalar_type(), {}, device});
    }
    known->dtype = at::promote_types(known->dtype, parameter.scalar_type());
    known->gradients.push_back(parameter.grad());
  }
  return all;
}

/// Half precisions would lose most digits of a norm.
std::optional<at::ScalarType> wide(const std::vector<RankGradients>& all) {
  at::ScalarType dtype = at::kFloat;
  for (const RankGradients& of : all) dtype = at::promote_types(dtype, of.dtype);
  return at::isComplexType(dtype) ? std::nullopt : std::make_optional(dtype);
}

}  // namespace

at::Tensor clip_grad_norm(const std::vector<at::Tensor>& listed, double max_norm, double norm_type,
                          const Group& around) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = each_once(listed);
  const std::vector<RankGradients> all = gradients_by_group(parameters, around);
  const at::Tensor norm = total_norm(all, norm_type, wide(all));
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  scale_gradients(gradients, clip_factor(norm, max_norm));
  return norm;
}

}  // namespace libddp
