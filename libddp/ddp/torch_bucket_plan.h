#pragma once

// The buckets that torch's DDP makes, for a communication hook: what it computes may hang on which
// gradients lie together and in which order (PowerSGD, quantisation, torchft's replicas). Pure.
//
// In torch a bucket is full with the parameter that reaches its limit, which may exceed it, and
// there is no small last one. Its first buckets hold parameters in the order of the model.
// Thread rule: pure functions.
//
//   BucketPlan first = first_torch_plan(sizes, indices, torch_limits(limits));
//   BucketPlan later = torch_plan(sizes, order_of_gradients, torch_limits(limits));
//
// Source: c10d's compute_bucket_assignment_by_size as its hooks see it, with torch 2.11 and 2.15.

#include <cstddef>
#include <vector>

#include "libddp/ddp/bucket_plan.h"

namespace libddp {

/// The limits of the first, second, ... bucket of each dtype, the last one of all that follow.
std::vector<std::size_t> torch_limits(const BucketLimits& limits);

/// REQUIRES: `order` names indices of `parameters`, each at most once; some limit.
/// ENSURES: full buckets in the order in which they have become full, then one for each dtype that
/// has parameters left, the dtype that came first at the end.
BucketPlan torch_plan(const std::vector<ParameterSize>& parameters,
                      const std::vector<std::size_t>& order,
                      const std::vector<std::size_t>& limits);

/// Before the order of gradients is known: parameters in ascending order, the bucket of the first
/// one last. REQUIRES: `indices` ascending.
BucketPlan first_torch_plan(const std::vector<ParameterSize>& parameters,
                            const std::vector<std::size_t>& indices,
                            const std::vector<std::size_t>& limits);

}  // namespace libddp
