#pragma once

// What DistributedDataParallel can be told; the same on every rank. Thread rule: plain data.
//
//   libddp::DistributedDataParallel model(net, group, {.cap_bytes = 50u << 20});

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "libddp/module/named_tensor.h"

namespace libddp {

struct MixedPrecision {
  /// half or bfloat16: parameters compute in it; between passes they have their own precision.
  std::optional<c10::ScalarType> param_dtype = {};
  /// Gradients are averaged in it; none = param_dtype, or the parameters' own.
  std::optional<c10::ScalarType> reduce_dtype = {};
  /// Floating-point buffers are converted to it when the model is wrapped.
  std::optional<c10::ScalarType> buffer_dtype = {};
};

struct DistributedDataParallelOptions {
  /// Largest bucket, and the first one, which is small so that communication starts early.
  std::size_t cap_bytes = std::size_t{25} << 20;
  std::size_t first_bytes = std::size_t{1} << 20;
  /// The first one under a communication hook; torch's is the largest where that is not the
  /// default.
  std::size_t hook_first_bytes = std::size_t{1} << 20;
  /// See BucketLimits::each_bytes.
  std::vector<std::size_t> each_bytes = {};
  bool find_unused_parameters = false;
  bool static_graph = false;
  /// See ReducerOptions::skip_unused_buckets.
  bool skip_unused_buckets = false;
  /// See ReducerOptions::gradient_as_bucket_view.
  std::optional<bool> gradient_as_bucket_view = std::nullopt;
  /// Names of parameters whose gradients are sparse COO tensors; see sparse_gradients.h.
  std::vector<std::string> sparse_parameters = {};
  /// Before the first forward, and before each one that follows a synchronising one.
  bool broadcast_buffers = true;
  /// Check that the ranks agree, and start all of them from rank 0's values.
  bool init_sync = true;
  /// From rank 0's buffers too.
  bool init_sync_buffers = true;
  MixedPrecision mixed_precision = {};
};

/// Averaged apart from the others; see delayed_gradients.h.
struct DelayedParameters {
  NamedTensors parameters;
  /// A leaf that requires a gradient; may be one of them.
  at::Tensor trigger;
  /// See ReducerOptions.
  bool gradient_as_bucket_view = true;
};

}  // namespace libddp
