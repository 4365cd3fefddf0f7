#include "libddp/ddp/sync_batch_norm.h"

#include <fmt/format.h>
#include <torch/nn/functional/batchnorm.h>

#include <optional>
#include <string>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/ddp/sync_batch_norm_function.h"

namespace libddp {

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group)
    : NormImplBase(options), group_(std::move(group)) {
  if (!group_) {
    throw ArgumentError("libddp: SyncBatchNorm: there is no group. Hint: pass that of the model.");
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  const double momentum = count_batch();
  if (!is_training() || group_->size() == 1) {
    return torch::nn::functional::detail::batch_norm(
        input, running_mean, running_var, weight, bias,
        /*training=*/is_training() || !running_mean.defined(), momentum, options.eps());
  }
  const auto given = [](const at::Tensor& parameter) {
    return parameter.defined() ? std::make_optional(parameter) : std::nullopt;
  };
  return SyncBatchNormFunction::apply(input, given(weight), given(bias),
                                      RunningStatistics{running_mean, running_var, momentum},
                                      options.eps(), group_);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  const std::string momentum = options.momentum() ? fmt::to_string(*options.momentum()) : "none";
  stream << fmt::format(
      "libddp::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={})",
      options.num_features(), options.eps(), momentum, options.affine(),
      options.track_running_stats());
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() >= 2 && input.size(1) == options.num_features() && input.is_floating_point()) {
    return;
  }
  throw ArgumentError(fmt::format(
      "libddp[group {}, rank {}/{}] SyncBatchNorm: takes floating-point [N, {}, ...], got {} [{}]",
      group_->name(), group_->rank(), group_->size(), options.num_features(),
      c10::toString(input.scalar_type()), fmt::join(input.sizes(), ", ")));
}

double SyncBatchNormImpl::count_batch() {
  if (!is_training() || !num_batches_tracked.defined()) return options.momentum().value_or(0.0);
  num_batches_tracked += 1;
  // Without a momentum, all batches have the same share.
  return options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
}

}  // namespace libddp
