#pragma once

// From a source into the memory where the bytes belong: checked and copied in one pass.
//
// Chunks of which nothing is wanted are not read. A chunk that is wanted in part is read as a
// whole, since its checksum says nothing about a part. Thread rule: any thread; one per
// destination.
//
//   scatter(source, {{.offset = 0, .bytes = 4096, .to = parameter}}, /*num_threads=*/2);

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libddp/slots/chunk_source.h"
#include "libddp/slots/indirect_memory.h"

namespace libddp {

/// Bytes of a source, and where they go.
struct Segment {
  /// Among the data of the source.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::byte* to = nullptr;
};

/// Throws SnapshotError that names the source, the tensors and their bytes at the first chunk that
/// is not what was stored; destinations are then filled in part, those in `indirect`, to which
/// chunks go once they have been checked, with what was stored. REQUIRES segments within the data
/// that do not overlap.
void scatter(const ChunkSource& source, std::vector<Segment> segments, int num_threads = 1,
             IndirectMemory* indirect = nullptr);

/// Only checks. Throws as scatter does.
void verify(const ChunkSource& source, int num_threads = 1);

/// Bytes of the data that are not what was stored, as far as checksums tell: whole chunks.
struct Damage {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  bool operator==(const Damage&) const = default;
};

/// All of it, by offset; neighbours are one. Throws SnapshotError for bytes that cannot be read.
std::vector<Damage> find_damage(const ChunkSource& source, int num_threads = 1);

}  // namespace libddp
