#pragma once

// Scales gradients to a norm over the whole model, of which each rank may own a part.
// Thread rule: a collective of the groups that the parameters are sharded over.
//
//   loss.backward();
//   at::Tensor norm = libddp::clip_grad_norm(net->parameters(), 1.0);

#include <ATen/core/Tensor.h>

#include <vector>

namespace libddp {

/// Parameters of sharded units and ordinary ones; `norm_type` may be infinity. Returns the norm
/// before, the same on every rank. One that is listed twice (tied weights) counts once.
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type = 2.0);

}  // namespace libddp
