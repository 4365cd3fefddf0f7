#pragma once

// Fills a slot with bytes that come one after another, from a network: each chunk is checked
// against its checksum as it comes. The slot is whole after finish() and not before; a writer that
// goes without finish() leaves it empty, the other slot is not touched. Thread rule: one thread,
// the slot's writer.
//
//   SlotWriter writer(memory, 1, checksums);
//   while (!writer.space().empty()) writer.advance(read_some(socket, writer.space()));
//   writer.finish({.step = 700, .sequence = 12}, "{}");

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "libddp/slots/slot_memory.h"

namespace libddp {

class SlotWriter {
 public:
  /// `checksums`: of each chunk. REQUIRES a slot that is reserved, or that nobody else knows.
  SlotWriter(SlotMemory& memory, int slot, const std::vector<std::uint32_t>& checksums);
  ~SlotWriter();
  SlotWriter(const SlotWriter&) = delete;
  SlotWriter& operator=(const SlotWriter&) = delete;

  /// Where the next bytes belong, to the end of the chunk; empty if all are there.
  std::span<std::byte> space() const;
  /// Number of the chunk that space() is in.
  std::size_t chunk() const { return chunk_; }
  /// Bytes at the front of space() have come. Throws SnapshotError with a clause that names the
  /// tensors and their bytes if they end a chunk that has another checksum.
  void advance(std::size_t bytes);
  /// REQUIRES space() empty.
  void finish(const SavedStep& saved, std::string_view values);

 private:
  SlotMemory& memory_;
  Slot& slot_;
  std::size_t chunk_ = 0;
  /// Of the chunk.
  std::size_t filled_ = 0;
  std::uint32_t sum_ = 0;
  bool is_finished_ = false;
};

}  // namespace libddp
