#pragma once

// Which rows of each parameter a rank owns, and where parameters and shards lie in memory.
//
// Words: a *row* is an element of dim 0 with all that is under it; a *shard* is the rows of one
// parameter that one rank owns: those that torch.chunk(parameter, world_size) gives it, which are
// what a DTensor with Shard(0) has there. So the first ranks have ceil(rows / world_size) each, and
// the last ones of a short parameter have none. A scalar is rank 0's.
//
// There are two orders. The *whole array* has the parameters one behind the other, each contiguous:
// it is what a computation reads. A *block* has the shards of one rank one behind the other; the
// *blocks* of all ranks, which are of one length, are what collectives move. A parameter's shard
// lies at the same place of each block. On one rank the two orders are the same. Where
// `pads_chunks`, a parameter has room in the whole array for world_size times its largest shard, so
// that the shards of all ranks can be gathered right there: see libddp/fsdp/device_memory.h. Pure:
// no tensors, no processes. Thread rule: immutable after construction.
//
//   FlatLayout layout({{10, 5}, {5}}, 2);
//   layout.offset(1);        // where parameter 1 begins in the whole array
//   layout.shard(0, 1);      // elements of parameter 0 that rank 1 owns: [25, 50)
//   layout.shard_offset(0);  // where they begin in its block

#include <cstddef>
#include <cstdint>
#include <vector>

namespace libddp {

class FlatLayout {
 public:
  using Shape = std::vector<std::int64_t>;
  /// Elements [begin, end) of a parameter.
  struct ShardSpec {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t numel() const { return end - begin; }
  };

  /// Blocks, parameters and shards start at multiples of this many elements.
  static constexpr std::int64_t kAlignment = 32;

  /// REQUIRES: world_size >= 1. Shapes may hold zeros; [] is a scalar.
  FlatLayout(std::vector<Shape> shapes, int world_size, bool pads_chunks = false);

  std::size_t size() const { return shapes_.size(); }
  int world_size() const { return world_size_; }
  /// Of the whole array, padding included.
  std::int64_t whole_numel() const { return whole_numel_; }
  std::int64_t block_numel() const { return block_numel_; }
  /// Of all blocks.
  std::int64_t blocks_numel() const { return block_numel_ * world_size_; }
  const Shape& shape(std::size_t parameter) const { return shapes_[parameter]; }
  std::int64_t numel_of(std::size_t parameter) const { return numels_[parameter]; }
  /// In the whole array.
  std::int64_t offset(std::size_t parameter) const { return offsets_[parameter]; }

  ShardSpec shard(std::size_t parameter, int rank) const;
  /// Of the largest shard of a parameter, which is rank 0's.
  std::int64_t chunk_numel(std::size_t parameter) const { return shard(parameter, 0).numel(); }
  /// [rows, ...]; [1] or [0] of a scalar.
  Shape shard_shape(std::size_t parameter, int rank) const;
  /// In each block: `size()` elements behind the shards, for a word about each parameter.
  std::int64_t notes_offset() const { return notes_offset_; }
  /// In each block.
  std::int64_t shard_offset(std::size_t parameter) const { return shard_offsets_[parameter]; }
  /// The same, in the blocks of all ranks.
  std::int64_t shard_offset(std::size_t parameter, int rank) const {
    return block_numel_ * rank + shard_offsets_[parameter];
  }

 private:
  std::int64_t num_rows(std::size_t parameter) const;
  std::int64_t first_row(std::size_t parameter, int rank) const;

  std::vector<Shape> shapes_;
  std::vector<std::int64_t> numels_;
  int world_size_;
  std::vector<std::int64_t> offsets_;
  std::int64_t whole_numel_ = 0;
  std::vector<std::int64_t> shard_offsets_;
  std::int64_t notes_offset_ = 0;
  std::int64_t block_numel_ = 0;
};

}  // namespace libddp
