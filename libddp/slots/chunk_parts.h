#pragma once

// What a chunk is made of, where several sources lie one behind the other: it may be a part of one,
// or parts of many. Thread rule: immutable.
//
//   const ChunkParts parts({weight_bytes, bias_bytes});
//   parts.each(0, [&](const ChunkParts::Part& part) {
//     std::memcpy(chunk + part.at, source[part.source] + part.from, part.bytes);
//   });

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "libddp/kernels/crc32c.h"
#include "libddp/slots/chunk_source.h"

namespace libddp {

class ChunkParts {
 public:
  struct Part {
    std::size_t source = 0;
    /// In the source.
    std::uint64_t from = 0;
    /// In the chunk.
    std::uint64_t at = 0;
    std::uint64_t bytes = 0;
  };

  /// Bytes of each source.
  explicit ChunkParts(std::vector<std::uint64_t> sizes) : sizes_(std::move(sizes)) {
    for (const std::uint64_t size : sizes_) {
      begins_.push_back(total_);
      total_ += size;
    }
  }

  std::uint64_t total() const { return total_; }

  /// The parts of a chunk in their order, none of them empty.
  template <typename Function>
  void each(std::size_t index, Function&& function) const {
    const std::uint64_t begin = index * kChunkBytes;
    const std::uint64_t end = begin + chunk_bytes(total_, index);
    const auto behind = std::upper_bound(begins_.begin(), begins_.end(), begin);
    auto source = static_cast<std::size_t>(behind - begins_.begin() - 1);
    for (std::uint64_t at = begin; at < end; ++source) {
      const std::uint64_t from = at - begins_[source];
      const std::uint64_t bytes = std::min(sizes_[source] - from, end - at);
      if (bytes > 0) function(Part{source, from, at - begin, bytes});
      at += bytes;
    }
  }

  /// Copies a chunk to `to` and returns its checksum; `data_of` gives the bytes of a part.
  template <typename DataOf>
  std::uint32_t copy(std::size_t index, std::byte* to, DataOf&& data_of) const {
    std::uint32_t sum = 0;
    each(index, [&](const Part& part) {
      sum = copy_with_crc32c(to + part.at, data_of(part), part.bytes, sum);
    });
    return sum;
  }

 private:
  const std::vector<std::uint64_t> sizes_;
  std::vector<std::uint64_t> begins_;
  std::uint64_t total_ = 0;
};

}  // namespace libddp
