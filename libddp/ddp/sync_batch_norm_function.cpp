#include "libddp/ddp/sync_batch_norm_function.h"

#include <ATen/core/custom_class.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "libddp/base/error.h"

namespace libddp {
namespace {

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(Group given) : group(std::move(given)) {}
  Group group;
};

/// Of the batches of all ranks; float64 on the input's device.
struct Statistics {
  /// [C].
  at::Tensor mean;
  /// [C]; biased.
  at::Tensor variance;
  /// [1]: values per channel.
  at::Tensor count;
};

/// What statistics and parameters have in ATen's kernels.
c10::ScalarType computed_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::optional<at::Tensor> in(c10::ScalarType dtype, const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  return tensor->to(dtype);
}

/// [C] as [1, C, 1, ...].
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return values.view(shape);
}

/// Mean, sum of squared distances from it, and number of values: [2 * C + 1], float64.
at::Tensor describe(const at::Tensor& input) {
  const std::int64_t num_channels = input.size(1);
  const auto options = input.options().memory_format(c10::nullopt).dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({2 * num_channels + 1}, options);
  const std::int64_t count = input.numel() / num_channels;
  // Unused, but they say in which precision to compute.
  const at::Tensor running = at::zeros({2, num_channels}, options.dtype(computed_type(input)));
  auto [mean, variance] = at::batch_norm_update_stats(input, running[0], running[1], 0.0);
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble).mul_(static_cast<double>(count)),
                  at::full({1}, count, options)});
}

Statistics put_together(const at::Tensor& input, const Group& group) {
  const at::Tensor mine = describe(input);
  const at::Tensor all = at::empty({group->size(), mine.numel()}, mine.options());
  group->all_gather_into(all, mine,
                         {.async = false, .timeout = {}, .label = "SyncBatchNorm statistics"});
  const std::int64_t num_channels = input.size(1);
  const at::Tensor means = all.narrow(1, 0, num_channels);
  const at::Tensor squares = all.narrow(1, num_channels, num_channels);
  const at::Tensor counts = all.narrow(1, 2 * num_channels, 1);
  const at::Tensor count = counts.sum(0);
  const at::Tensor mean = (means * counts).sum(0).div_(count);
  // Distances from a rank's own mean, moved to that of all.
  const at::Tensor variance =
      ((means - mean).square_().mul_(counts).add_(squares)).sum(0).div_(count);
  return {mean, variance, count};
}

/// Where one rank has two values, all have enough: only those that don't need to look.
void check_enough(const at::Tensor& input, const Statistics& all, const Group& group) {
  if (input.numel() >= 2 * input.size(1)) return;
  const double count = all.count.item<double>();
  if (count >= 2) return;
  throw ArgumentError(fmt::format(
      "libddp[group {}, rank {}/{}] SyncBatchNorm: the batches of all ranks have {:.0f} values per "
      "channel, and a variance needs two. Hint: larger batches, or eval().",
      group->name(), group->rank(), group->size(), count));
}

void update(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) running.mul_(1 - momentum).add_(value.to(running.scalar_type()), momentum);
}

/// Of this rank's batch, [2, C], float64: sums of gradients, and of gradients times normalized
/// input.
at::Tensor sums_of(const at::Tensor& grad, const at::Tensor& input,
                   const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                   const at::Tensor& variance, double eps) {
  if (input.numel() == 0) {
    return at::zeros({2, mean.numel()}, mean.options().dtype(at::kDouble));
  }
  auto [none, times_input, alone] =
      at::native_batch_norm_backward(grad, input, weight, mean, variance, {}, {},
                                     /*train=*/false, eps, {false, true, true});
  return at::stack({alone.to(at::kDouble), times_input.to(at::kDouble)});
}

}  // namespace

at::Tensor SyncBatchNormFunction::forward(torch::autograd::AutogradContext* context,
                                          const at::Tensor& input,
                                          const std::optional<at::Tensor>& weight,
                                          const std::optional<at::Tensor>& bias,
                                          const RunningStatistics& running, double eps,
                                          const Group& group) {
  const Statistics all = put_together(input, group);
  check_enough(input, all, group);
  update(running.mean, all.mean, running.momentum);
  update(running.variance, all.variance * (all.count / (all.count - 1)), running.momentum);

  const c10::ScalarType dtype = computed_type(input);
  const at::Tensor mean = all.mean.to(dtype);
  const at::Tensor variance = all.variance.to(dtype);
  context->save_for_backward({input, weight.value_or(at::Tensor()), mean, variance, all.count});
  context->saved_data["eps"] = eps;
  context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<GroupHolder>(group));
  if (input.numel() == 0) return at::empty_like(input);
  return std::get<0>(at::native_batch_norm(input, in(dtype, weight), in(dtype, bias), mean,
                                           variance, /*training=*/false, 0.0, eps));
}

torch::autograd::variable_list SyncBatchNormFunction::backward(
    torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
  const Group group =
      c10::static_intrusive_pointer_cast<GroupHolder>(context->saved_data["group"].toCapsule())
          ->group;
  if (at::GradMode::is_enabled()) {
    throw StateError(fmt::format(
        "libddp[group {}, rank {}/{}] SyncBatchNorm: has no second gradients (create_graph)",
        group->name(), group->rank(), group->size()));
  }
  const auto saved = context->get_saved_variables();
  const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
  const double eps = context->saved_data["eps"].toDouble();
  const c10::ScalarType dtype = computed_type(input);
  const at::Tensor& grad = grads[0];
  const at::Tensor sums = sums_of(grad, input, in(dtype, weight), mean, variance, eps);

  torch::autograd::variable_list result(6);  // one per argument of forward
  // Of this rank's batch: whoever averages the parameters' gradients adds the others.
  if (weight.defined()) {
    if (context->needs_input_grad(1)) result[1] = sums[1].to(weight.scalar_type());
    if (context->needs_input_grad(2)) result[2] = sums[0].to(weight.scalar_type());
  }
  if (!context->needs_input_grad(0)) return result;
  const at::Tensor all = sums.clone();
  group->all_reduce(all, {}, {.async = false, .timeout = {}, .label = "SyncBatchNorm gradients"});
  if (input.numel() == 0) {
    result[0] = at::zeros_like(input);
    return result;
  }
  // The input also moves the mean and the variance of the batch. In float64 as far as it is small.
  const at::Tensor inverse = (variance.to(at::kDouble) + eps).rsqrt_();
  const at::Tensor scale = weight.defined() ? weight * inverse : inverse;
  const at::Tensor means = all.div_(saved[4]);
  const at::Tensor by_mean = (scale * means[0]).neg_();
  const at::Tensor by_variance = (scale * inverse * means[1]).neg_();
  const auto spread = [&](const at::Tensor& values) {
    return per_channel(values.to(dtype), input);
  };
  result[0] = at::addcmul(spread(by_mean), input - spread(mean), spread(by_variance))
                  .addcmul_(grad, spread(scale))
                  .to(input.scalar_type());
  return result;
}

}  // namespace libddp
