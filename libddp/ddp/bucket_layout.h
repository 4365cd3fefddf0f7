#pragma once

// What lies in which bucket, in words and numbers: for explain() and for traces.
// Thread rule: plain data; describe_buckets as GradientBuckets.
//
//   BucketLayout layout = describe_buckets(*group, parameters, buckets, false);
//   std::cout << to_string(layout);

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>
#include <vector>

#include "libddp/ddp/gradient_buckets.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

struct BucketDescription {
  /// In the order in which their gradients lie in the bucket.
  std::vector<std::string> names;
  c10::ScalarType dtype = c10::ScalarType::Float;
  /// The gradients alone, and all that travels: with padding and flags.
  std::size_t gradient_bytes = 0;
  std::size_t total_bytes = 0;
  /// In memory that the ranks of the group share, so that communication copies nothing.
  bool is_in_arena = false;
};

struct BucketLayout {
  /// In the order in which the buckets are sent.
  std::vector<BucketDescription> buckets;
  /// The order in which gradients came in the first pass that synchronises; else the reverse order
  /// of the parameters, or where `is_torchs`, their order.
  bool is_rebuilt = false;
  /// Limits and order are torch's, for a communication hook (torch_bucket_plan.h).
  bool is_torchs = false;
  /// Parameters without a bucket: their gradients are sparse and sent after the buckets.
  std::vector<std::string> sparse_names{};
};

BucketLayout describe_buckets(const ProcessGroup& group, const NamedTensors& parameters,
                              const GradientBuckets& buckets, bool is_rebuilt);

/// A line per bucket.
std::string to_string(const BucketLayout& layout);

}  // namespace libddp
