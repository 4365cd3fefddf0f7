#pragma once

// Scales gradients to a norm over the whole model, of which each rank may own a part.
// Thread rule: a collective of the groups that the parameters are sharded over.
//
//   loss.backward();
//   at::Tensor norm = libddp::clip_grad_norm(net->parameters(), 1.0);

#include <ATen/core/Tensor.h>

#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// Parameters of sharded units and ordinary ones; `norm_type` may be infinity. Returns the norm
/// before, in float32 or what is wider, the same on every rank of a group. One that is listed twice
/// (tied weights) counts once. `around`: the ranks of the whole model, where some of them have
/// other parameters than others (experts, each sharded over some): the norm is over all of these,
/// and the same everywhere.
at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type = 2.0, const Group& around = nullptr);

}  // namespace libddp
