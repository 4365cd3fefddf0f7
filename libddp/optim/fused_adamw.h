#pragma once

// AdamW over many tensors in one pass, with torch's own fused kernel.
//
// Neighbours are updated as one: where parameters, gradients and moments of consecutive entries lie
// one behind the other in memory, as the shards of a sharded unit do, they make one run, and the
// kernel sees one large tensor instead of many small ones. The maths is that of
// torch.optim.AdamW(fused=True), bit for bit: every element is updated by itself.
// Source: torch's _fused_adamw_ (Loshchilov and Hutter, Decoupled Weight Decay Regularization).
// Thread rule: one thread at a time per tensor.
//
//   AdamwState state = make_adamw_state(parameters);
//   fused_adamw(parameters, gradients, state, {.lr = 3e-4});

#include <ATen/core/Tensor.h>

#include <vector>

namespace libddp {

struct AdamwOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
};

/// One entry per parameter; `steps` are scalars in float32 on the parameter's device,
/// `max_exp_avg_sqs` is empty without amsgrad.
struct AdamwState {
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;
  std::vector<at::Tensor> steps;
};

/// Zeros, laid out so that what is adjacent in the parameters is adjacent in the moments.
AdamwState make_adamw_state(const std::vector<at::Tensor>& parameters, bool amsgrad = false);

/// One step in place. Strides may be any: what does not lie in memory as its parameter does takes
/// part as a copy. `grad_scale`, `found_inf`: of a gradient scaler, or undefined: gradients are
/// divided by the former, and nothing happens where the latter is not zero.
/// On a device: see device_adamw.h.
/// REQUIRES: lists of one length; a gradient has its parameter's shape and dtype; all parameters
/// are on the CPU, or none is.
/// Returns the number of tensors that the kernel saw.
std::size_t fused_adamw(const std::vector<at::Tensor>& parameters,
                        const std::vector<at::Tensor>& gradients, const AdamwState& state,
                        const AdamwOptions& options, const at::Tensor& grad_scale = {},
                        const at::Tensor& found_inf = {});

}  // namespace libddp
