#pragma once

// Batch normalization over the batches of all ranks (torch.nn.SyncBatchNorm), for CPU and CUDA
// tensors. Parameters, buffers and their names are those of torch::nn::BatchNorm1d, 2d and 3d, in
// whose place it stands:
//
//   struct NetImpl : torch::nn::Module {
//     explicit NetImpl(const libddp::Group& group)
//         : norm(register_module("norm", libddp::SyncBatchNorm(64, group))) {}
//     at::Tensor forward(const at::Tensor& x) { return norm(x).relu(); }
//     libddp::SyncBatchNorm norm;
//   };
//
// Collectives, in training mode and a group of several ranks: a forward gathers 2 * num_features +
// 1 float64 from each rank; its backward pass sums 2 * num_features of them where the input
// requires a gradient. Ranks may have batches of different sizes, and some of them none. weight and
// bias get the gradient of this rank's batch, which DistributedDataParallel averages with the
// others. Otherwise (eval, one rank) it is torch::nn::BatchNorm, without collectives.
// Thread rule: that of a module.

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <ostream>

#include "libddp/group/process_group.h"

namespace libddp {

class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// `options`: the number of features alone, or all that a BatchNorm takes.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group);

  /// `input`: [N, C, ...] with C = num_features, the same on all ranks; floating-point. Returns the
  /// shape, dtype and memory format of `input`. Throws ArgumentError: before the collective where
  /// `input` has another shape, on all ranks where all of them together have fewer than two values
  /// per channel. StateError in a backward pass with create_graph.
  at::Tensor forward(const at::Tensor& input);

  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  /// The share of this batch in the running statistics; counts the batch.
  double count_batch();

  Group group_;
};

/// A holder, as torch::nn::BatchNorm2d is one.
TORCH_MODULE(SyncBatchNorm);

}  // namespace libddp
