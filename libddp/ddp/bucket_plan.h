#pragma once

// Which parameter's gradient travels in which bucket. Pure: sizes in, buckets out.
//
// A bucket is sent when all of its gradients are there, and buckets are sent in plan order, so the
// plan follows the order in which gradients become ready. Three sizes matter: the first bucket is
// small (communication starts early), the middle ones are large (few messages), the last one is
// small again: its transfer is the only one that no computation hides.
// Thread rule: pure function.
//
//   std::vector<ParameterSize> sizes = {{4 * 1024, at::kFloat}, {4 * 32, at::kFloat}};
//   BucketPlan plan = plan_buckets(sizes, reverse_order(sizes.size()), {});
//   // plan == {{1, 0}}

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

namespace libddp {

struct ParameterSize {
  std::size_t bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

struct BucketLimits {
  std::size_t first_bytes = std::size_t{1} << 20;
  std::size_t cap_bytes = std::size_t{25} << 20;
  std::size_t last_bytes = std::size_t{1} << 20;
  /// The first bucket's limit where a communication hook takes the buckets: torch_bucket_plan.h.
  std::size_t hook_first_bytes = std::size_t{1} << 20;
  /// Where given, the limits of the first, second, ... bucket instead of the three above; the last
  /// entry holds for all that follow.
  std::vector<std::size_t> each_bytes = {};
};

/// Indices of parameters, bucket by bucket.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// n - 1, ..., 0: the order in which gradients come, as long as nothing better is known.
std::vector<std::size_t> reverse_order(std::size_t n);

/// REQUIRES: `order` names indices of `parameters`, each at most once.
/// ENSURES: each index of `order` stands in one bucket; a bucket has one dtype; a bucket of several
/// parameters keeps its limit; within a dtype the order is kept; buckets stand in the order in
/// which their last gradient comes.
BucketPlan plan_buckets(const std::vector<ParameterSize>& parameters,
                        const std::vector<std::size_t>& order, const BucketLimits& limits);

}  // namespace libddp
