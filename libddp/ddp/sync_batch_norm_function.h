#pragma once

// What SyncBatchNorm computes in training mode, as an autograd function: ATen's kernels for this
// rank's batch, and between them what the ranks tell each other.
//
// The ranks' means and sums of squares are put together in double, in rank order: all ranks have
// the same statistics to the bit. Nothing waits for a device, but for batches of which a rank has
// less than two values per channel.
// Thread rule: forward in the thread that calls it, backward in autograd's.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "libddp/group/process_group.h"

namespace libddp {

/// What a batch changes; undefined where nothing is tracked.
struct RunningStatistics {
  /// [C].
  at::Tensor mean;
  /// [C]; of unbiased variances.
  at::Tensor variance;
  /// The batch's share.
  double momentum;
};

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  /// `input`: [N, C, ...]. `weight` and `bias`: [C], both or none.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const RunningStatistics& running,
                            double eps, const Group& group);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads);
};

}  // namespace libddp
