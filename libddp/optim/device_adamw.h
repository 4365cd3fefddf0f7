#pragma once

// The update of fused_adamw.h on a device: torch's fused kernel, which goes through all tensors of
// a dtype in a few launches wherever they lie. Steps are tensors there too, so that neither they
// nor a gradient scaler's word are read by the host, and a CUDA graph can hold the update.
// Thread rule: one thread at a time per tensor.
//
//   update_on_device(parameters, gradients, state, options, grad_scale, found_inf);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "libddp/optim/fused_adamw.h"

namespace libddp {

/// As fused_adamw, and counts steps; all elements in the kernel's order.
std::size_t update_on_device(const std::vector<at::Tensor>& parameters,
                             const std::vector<at::Tensor>& gradients, const AdamwState& state,
                             const AdamwOptions& options, const at::Tensor& grad_scale,
                             const at::Tensor& found_inf);

}  // namespace libddp
