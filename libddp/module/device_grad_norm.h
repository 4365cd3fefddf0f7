#pragma once

// The norm of gradients on a device. Nothing of it comes to the host, which goes on: the norm is a
// tensor there, as are the ranks' parts of it on their way. Thread rule: as total_norm.
//
//   const at::Tensor norm = device_grad_norm(of, 2.0);

#include <ATen/core/Tensor.h>

#include <optional>

#include "libddp/module/grad_norm.h"

namespace libddp {

/// As total_norm of one entry. REQUIRES: its gradients are on its device.
at::Tensor device_grad_norm(const RankGradients& of, double norm_type,
                            std::optional<at::ScalarType> computed_in);

}  // namespace libddp
