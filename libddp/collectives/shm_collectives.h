#pragma once

// The collectives as functions over a ShmCore; ShmComm checks the arguments and calls them.
// world_size is 2 or more in all of them.
//
// Thread rule: one at a time per core.
//
//   core.begin(call);
//   all_reduce(core, {call.description.dtype, call.description.op, scale}, data, count);

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libddp/base/dtype.h"
#include "libddp/base/reduce_op.h"
#include "libddp/collectives/shm_core.h"

namespace libddp {

struct Reduction {
  Dtype dtype = Dtype::Float32;
  ReduceOp op = ReduceOp::Sum;
  double scale = 1.0;
};

/// Throws ArgumentError if the call's op or `scale` means nothing for its dtype.
void check_reduction(const CommCall& call, double scale);

/// Elements [begin, end) of a buffer.
struct Slice {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t count() const { return end - begin; }
};

/// The part of `count` elements that `rank` owns. Slices end on cache lines, so that no two ranks
/// write to one; with few elements some ranks own nothing.
Slice slice_of(std::size_t count, std::size_t element_bytes, int rank, int world_size);

void all_reduce(ShmCore& core, const Reduction& reduction, std::byte* data, std::size_t count);
void reduce_scatter(ShmCore& core, const Reduction& reduction, const std::byte* input,
                    std::byte* output, std::size_t output_count);
void all_gather(ShmCore& core, const std::byte* input, std::byte* output, std::size_t input_bytes);
/// All blocks but the own one.
void all_to_all(ShmCore& core, const std::byte* input, std::byte* output, std::size_t block_bytes);
void broadcast(ShmCore& core, std::byte* data, std::size_t bytes, int root);
/// See ShmComm::share_slices.
void share_slices(ShmCore& core, std::byte* data, const std::vector<std::uint64_t>& edges);

}  // namespace libddp
