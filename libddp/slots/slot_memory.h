#pragma once

// What a rank keeps of its training in memory that outlives it: a layout and slots in one sealed
// memfd. At every moment one slot is whole, once the first save is done. Two take turns; the spare
// one is for saves that come faster than they can be copied to another host (slot_turns.h).
//
// The first page says what it is (a header with a checksum) and has the records of the slots; then
// come the layout's text, and per slot the checksums of its chunks, a text of values, and the data.
// Pages cost memory when they are first written. A layout that changes gets a memory of its own.
// Thread rule: immutable but for the slots; see slot.h.
//
//   SlotMemory memory = SlotMemory::create(layout, {.run = "job 7", .rank = 0, .world_size = 2},
//                                          64u << 10);
//   memory.slot(0).fill({.step = 700, .sequence = 1}, sources, "{}", 1);
//   SlotMemory same = SlotMemory::open(fd_from_another_process);

#include <array>
#include <cstdint>
#include <string>

#include "libddp/base/unique_fd.h"
#include "libddp/memory/shared_segment.h"
#include "libddp/slots/chunk_source.h"
#include "libddp/slots/slot.h"

namespace libddp {

/// Whose memory it is.
struct SlotIdentity {
  /// Of the job; at most 63 bytes.
  std::string run;
  int rank = 0;
  int world_size = 1;
  /// The higher, the newer: the upper half counts the layouts of a rank, the lower one is the
  /// start's that made it, so that parts of a job that went on apart have others.
  std::uint64_t generation = 0;
};

class SlotMemory {
 public:
  static constexpr int kSlots = 3;
  /// The last one.
  static constexpr int kSpare = kSlots - 1;

  /// Throws Error with the system's reason if there is no memory to map.
  /// `reserved`: made by SharedSegment::reserve and never written; used where it is large enough.
  static SlotMemory create(PieceLayout layout, const SlotIdentity& identity,
                           std::uint64_t values_capacity, SharedSegment reserved = {});
  /// Throws SnapshotError if it is no memory of slots, or was damaged; nothing in it is trusted.
  static SlotMemory open(UniqueFd fd);

  /// Throws as open does, if it has been damaged since.
  void check() const;
  /// Whether the descriptor is of this memory.
  bool is_behind(int fd) const { return segment_.is_behind(fd); }

  const PieceLayout& layout() const { return layout_; }
  const SlotIdentity& identity() const { return identity_; }
  std::uint64_t values_capacity() const { return values_capacity_; }
  int fd() const { return segment_.fd(); }
  std::byte* data() const { return segment_.data(); }
  std::uint64_t size_bytes() const { return segment_.size_bytes(); }
  Slot& slot(int index) { return slots_[static_cast<std::size_t>(index)]; }
  const Slot& slot(int index) const { return slots_[static_cast<std::size_t>(index)]; }
  /// Bytes that a memory takes whose slots are written, but for the spare one.
  static std::uint64_t bytes_needed(const PieceLayout& layout, std::uint64_t values_capacity);
  /// Its size: with the spare slot.
  static std::uint64_t bytes_mapped(const PieceLayout& layout, std::uint64_t values_capacity);
  /// Where the data of the first save lie among these.
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t bytes = 0;
  };
  static Range data_of_first_save(const PieceLayout& layout, std::uint64_t values_capacity);

 private:
  SlotMemory(SharedSegment segment, PieceLayout layout, SlotIdentity identity,
             std::uint64_t values_capacity);

  SharedSegment segment_;
  PieceLayout layout_;
  SlotIdentity identity_;
  std::uint64_t values_capacity_ = 0;
  std::array<Slot, kSlots> slots_;
};

/// A slot that is whole, as bytes to read. The memory must outlive it.
class SlotSource final : public ChunkSource {
 public:
  SlotSource(const SlotMemory& memory, int slot) : memory_(memory), slot_(slot) {}

  const PieceLayout& layout() const override { return memory_.layout(); }
  std::uint32_t checksum(std::size_t index) const override {
    return memory_.slot(slot_).checksum(index);
  }
  std::span<const std::byte> chunk(std::size_t index, std::vector<std::byte>&) const override {
    const auto data = memory_.slot(slot_).data();
    return data.subspan(index * kChunkBytes, chunk_bytes(data.size(), index));
  }
  bool stays() const override { return true; }
  std::string name() const override;

 private:
  const SlotMemory& memory_;
  const int slot_;
};

}  // namespace libddp
