#pragma once

// The norm of a model's gradients, of which each rank may have a part, as torch's clip_grad_norm_
// computes it of whole ones. Thread rule: collectives of the groups in it, in their order.
//
//   const at::Tensor norm = total_norm({{group, at::kFloat, own_parts}}, 2.0);
//   const at::Tensor factor = clip_factor(norm, 1.0);
//   scale_gradients(gradients, factor);

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

struct RankGradients {
  /// Its ranks have a part of each gradient; null, or of one rank: they are whole here.
  Group group;
  /// Of the norm; the same on all ranks, whatever gradients they have.
  at::ScalarType dtype = at::kFloat;
  /// One for each parameter, in the same order on all ranks; undefined where this rank has none.
  std::vector<at::Tensor> gradients;
  /// Where they are, or would be.
  c10::Device device = c10::kCPU;
};

/// The norm of all of them together, the same on every rank that has the same `all`. Orders as in
/// torch: any number, infinity (the largest), -infinity (the smallest) and 0 (how many gradients
/// have an element other than 0). Zero without gradients. On the device of the first entry; nothing
/// waits for a device. `computed_in`: of the norms, each gradient's too; none = as torch.nn.utils
/// does it, in the gradients' dtypes.
at::Tensor total_norm(const std::vector<RankGradients>& all, double norm_type,
                      std::optional<at::ScalarType> computed_in = std::nullopt);

/// What gradients with this norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

/// Multiplies gradients, each of which may be undefined or on another device, in place.
void scale_gradients(const std::vector<at::Tensor>& gradients, const at::Tensor& factor);

}  // namespace libddp
