#pragma once

// Who is calling what: travels with every collective, so that a mismatch or a missing rank is named
// precisely with no debug variable set beforehand.

#include <cstdint>
#include <string>
#include <string_view>

#include "libddp/base/deadline.h"
#include "libddp/base/dtype.h"
#include "libddp/base/reduce_op.h"

namespace libddp {

enum class OpKind : std::uint8_t {
  AllReduce,
  ReduceScatter,
  AllGather,
  Broadcast,
  Barrier,
  Reduce,
  Gather,
  Scatter,
  AllToAll,
  Send,
  Recv,
};

/// `all_reduce`.
std::string_view name(OpKind kind);

/// Everything that must be equal on all ranks of one collective. Plain data: it is copied into
/// the shared page, and its fingerprint into the flag that is written anyway.
struct OpDescription {
  OpKind kind = OpKind::Barrier;
  Dtype dtype = Dtype::UInt8;
  ReduceOp reduce_op = ReduceOp::Sum;
  std::int32_t root = -1;
  /// Elements of the full buffer (for all-gather and reduce-scatter: of all ranks together).
  std::uint64_t count = 0;
  /// Shape as the user passed it, for messages; at most kMaxDims are kept.
  static constexpr int kMaxDims = 6;
  std::int32_t num_dims = 0;
  std::int64_t shape[kMaxDims] = {};
  /// What the bytes serve ("bucket 3 (wte.weight, ...)"), cut to fit, filled with zeros: two
  /// buckets of the same size are not taken for each other.
  char label[48] = {};
  /// Its tensors are on an accelerator. No part of the fingerprint: the two kinds never meet.
  bool is_on_device = false;

  /// Equal on two ranks exactly if they agree on kind, dtype, op, root, count, shape and label.
  std::uint64_t fingerprint(std::uint64_t sequence) const;
  /// `all_reduce #42 float32 [25, 1024] SUM (bucket 3)`.
  std::string to_string(std::uint64_t sequence) const;
};

}  // namespace libddp
