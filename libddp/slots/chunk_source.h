#pragma once

// Stored bytes of a rank that can be checked: pieces by their layout, and a checksum (CRC32C) for
// each chunk of 4 MiB. Slots in memory and files are sources. Thread rule: any thread.
//
//   for (std::size_t i = 0; i < num_chunks(source.layout().data_bytes()); ++i) {
//     std::vector<std::byte> scratch;
//     const auto bytes = source.chunk(i, scratch);
//     if (crc32c(bytes.data(), bytes.size()) != source.checksum(i)) ...
//   }

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "libddp/slots/piece_layout.h"

namespace libddp {

inline constexpr std::uint64_t kChunkBytes = 4u << 20;

inline std::size_t num_chunks(std::uint64_t data_bytes) {
  return static_cast<std::size_t>((data_bytes + kChunkBytes - 1) / kChunkBytes);
}

/// Bytes of a chunk; the last one may be short.
inline std::size_t chunk_bytes(std::uint64_t data_bytes, std::size_t index) {
  return static_cast<std::size_t>(std::min(kChunkBytes, data_bytes - index * kChunkBytes));
}

class ChunkSource {
 public:
  virtual ~ChunkSource() = default;

  virtual const PieceLayout& layout() const = 0;
  virtual std::uint32_t checksum(std::size_t index) const = 0;
  /// Valid until `scratch` changes. Throws SnapshotError if they cannot be read.
  virtual std::span<const std::byte> chunk(std::size_t index,
                                           std::vector<std::byte>& scratch) const = 0;
  /// Whether a chunk's bytes stay where they are as long as the source, whatever `scratch` does.
  virtual bool stays() const { return false; }
  /// Threads that read it best where the caller has so many cores.
  virtual int num_readers(int num_cores) const { return num_cores; }
  /// For messages: "the memory of rank 1, step 700", a path.
  virtual std::string name() const = 0;
};

}  // namespace libddp
