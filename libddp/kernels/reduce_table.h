#pragma once

// What one instruction set offers to the dispatcher: a kernel per dtype and operation.
// Thread rule: constant after start.
//
//   KernelTable table = avx2_kernels();
//   if (table.find) table.find(Dtype::Float32, ReduceOp::Sum)(job);

#include <cstddef>
#include <cstdint>

#include "libddp/base/dtype.h"
#include "libddp/base/reduce_op.h"

namespace libddp {

/// A ReduceJob whose dtype and op are already part of the function; Avg has become Sum.
struct KernelJob {
  std::size_t count = 0;
  const std::byte* const* sources = nullptr;
  int num_sources = 0;
  std::byte* const* destinations = nullptr;
  int num_destinations = 0;
  /// The result is divided by `divisor`, then multiplied by `factor`; 1 skips the step.
  double divisor = 1.0;
  double factor = 1.0;
  /// Sums of floating types go past the caches; other kernels need not heed it. REQUIRES
  /// destinations on cache lines that are no sources.
  bool streams = false;
};

using ReduceKernel = void (*)(const KernelJob& job);

struct KernelTable {
  /// Null where the build has no kernels for the instruction set.
  ReduceKernel (*find)(Dtype dtype, ReduceOp op) = nullptr;
  /// Copies past the caches; null where there is no such store. REQUIRES 64-byte aligned `to`
  /// and `bytes` a multiple of 64.
  void (*stream)(std::byte* to, const std::byte* from, std::size_t bytes) = nullptr;
  /// Copies ranges that do not overlap. REQUIRES bytes >= 256.
  void (*copy)(std::byte* to, const std::byte* from, std::size_t bytes) = nullptr;
  /// float32 to bf16, to nearest even, NaNs as the quiet one; and back. No overlap.
  void (*narrow)(std::uint16_t* to, const float* from, std::size_t count) = nullptr;
  void (*widen)(float* to, const std::uint16_t* from, std::size_t count) = nullptr;
};

KernelTable scalar_kernels();
KernelTable avx2_kernels();
KernelTable avx512_kernels();

/// The best ones that this CPU can run.
const KernelTable& best_kernels();

}  // namespace libddp
