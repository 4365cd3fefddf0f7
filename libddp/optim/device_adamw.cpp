#include "libddp/optim/device_adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adamw.h>

#include <map>
#include <optional>
#include <utility>

namespace libddp {
namespace {

using Tensors = std::vector<at::Tensor>;

/// What one call of the kernel takes.
struct Call {
  Tensors parameters;
  Tensors gradients;
  AdamwState state;
};

std::optional<at::Tensor> on_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() ? std::optional(tensor.to(device, /*non_blocking=*/true)) : std::nullopt;
}

void run(Call& call, const AdamwOptions& options, const at::Tensor& grad_scale,
         const at::Tensor& found_inf) {
  const c10::Device device = call.parameters.front().device();
  const std::optional<at::Tensor> infinities = on_device(found_inf, device);
  at::_foreach_add_(call.state.steps, 1);
  at::_fused_adamw_(call.parameters, call.gradients, call.state.exp_avgs, call.state.exp_avg_sqs,
                    call.state.max_exp_avg_sqs, call.state.steps, options.lr, options.beta1,
                    options.beta2, options.weight_decay, options.eps, options.amsgrad,
                    options.maximize, on_device(grad_scale, device), infinities);
  // A step with infinities counts nothing.
  if (infinities) {
    at::_foreach_sub_(call.state.steps, Tensors(call.state.steps.size(), *infinities));
  }
}

}  // namespace

std::size_t update_on_device(const Tensors& parameters, const Tensors& gradients,
                             const AdamwState& state, const AdamwOptions& options,
                             const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  std::map<std::pair<c10::DeviceIndex, at::ScalarType>, Call> calls;
  std::size_t num_tensors = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    Call& call = calls[{parameter.device().index(), parameter.scalar_type()}];
    call.parameters.push_back(parameter);
    call.gradients.push_back(gradients[i]);
    call.state.exp_avgs.push_back(state.exp_avgs[i]);
    call.state.exp_avg_sqs.push_back(state.exp_avg_sqs[i]);
    if (options.amsgrad) call.state.max_exp_avg_sqs.push_back(state.max_exp_avg_sqs[i]);
    call.state.steps.push_back(state.steps[i]);
    ++num_tensors;
  }
  for (auto& [kind, call] : calls) run(call, options, grad_scale, found_inf);
  return num_tensors;
}

}  // namespace libddp
