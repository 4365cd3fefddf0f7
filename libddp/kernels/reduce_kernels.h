#pragma once

// Element-wise reduction of several buffers into several buffers: the arithmetic of every
// collective, for plain pointers.
//
// Sources are combined in their order, bf16 and fp16 in fp32 with one rounding at the end (nearest
// even), float32 and float64 natively, integers with wrap-around; so every path (scalar, AVX2,
// AVX-512) gives the same bits. Bool: SUM and MAX are OR, PRODUCT and MIN are AND, as in torch.
// AVG adds first, then divides by the number of sources. For a power of two this equals torch's
// DDP, which divides each gradient before the sum; for other numbers it is one rounding better.
// Thread rule: free functions without state; any thread.
//
//   const std::byte* sources[] = {mine, theirs};
//   std::byte* destinations[] = {mine, theirs};   // a destination may be a source
//   reduce({.dtype = Dtype::Float32, .op = ReduceOp::Sum, .count = 1000, .sources = sources,
//           .num_sources = 2, .destinations = destinations, .num_destinations = 2});

#include <cstddef>
#include <string_view>
#include <vector>

#include "libddp/base/dtype.h"
#include "libddp/base/reduce_op.h"

namespace libddp {

struct ReduceJob {
  Dtype dtype = Dtype::Float32;
  ReduceOp op = ReduceOp::Sum;
  /// Elements of each source and each destination.
  std::size_t count = 0;
  const std::byte* const* sources = nullptr;
  int num_sources = 0;
  std::byte* const* destinations = nullptr;
  int num_destinations = 0;
  /// Multiplies the result, floating types only.
  double scale = 1.0;
  /// Elements of the whole result where this job makes a part of it; 0 = this job is all. Large
  /// results in one place that is no source go past the caches.
  std::size_t whole_count = 0;
  /// What AVG divides by; 0 = num_sources. For sources that are sums themselves.
  int num_averaged = 0;
};

/// Instruction sets for which kernels exist.
enum class ReducePath { Scalar, Avx2, Avx512 };

std::string_view name(ReducePath path);

/// BAND, BOR, BXOR need integers or bool; AVG floating types. 8-bit floats take nothing.
bool reducible(Dtype dtype, ReduceOp op);
/// Whether `scale` means anything for this type.
bool scalable(Dtype dtype);

/// The paths that this CPU can run, the best one last.
const std::vector<ReducePath>& reduce_paths();

/// Runs `job` on the best path. REQUIRES reducible(dtype, op).
void reduce(const ReduceJob& job);
/// The same on a path of reduce_paths(), for tests and benchmarks.
void reduce_on(ReducePath path, const ReduceJob& job);

}  // namespace libddp
