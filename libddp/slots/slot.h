#pragma once

// One of the two places of a SlotMemory: bytes of all pieces at one step of the training, their
// checksums, and a text of values.
//
// NOTE [Whole or not]
// The state word says "writing" before the first byte changes and "whole" behind the last, and a
// process that is killed keeps what it has stored. So a slot that says "whole" is: its record
// (step, sizes, checksums of table and values) has a checksum of its own, which the state word
// cannot outrun. What the memory itself does to the bytes (a flipped bit) shows in the checksums:
// of the record, of the table and of the values here, of the chunks in scatter.h. Thread rule: one
// writer; readers in any process see a slot that is whole, or none.
//
//   slot.fill({.step = 700, .sequence = 12}, sources, values_json, /*num_threads=*/1);
//   if (const auto step = slot.whole()) SlotSource(memory, 0) ...

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace libddp {

/// Which of the saves a slot holds.
struct SavedStep {
  /// The user's count; may repeat or fall.
  std::int64_t step = 0;
  /// Counts the saves of a run, equal on all ranks.
  std::uint64_t sequence = 0;

  bool operator==(const SavedStep&) const = default;
};

/// Words in shared memory, on cache lines of their own.
struct alignas(128) SlotRecord {
  std::atomic<std::uint64_t> state;
  /// Not zero: somebody reads the slot, it must not be written.
  std::atomic<std::uint64_t> held;
  std::int64_t step;
  std::uint64_t sequence;
  std::uint64_t values_bytes;
  std::uint32_t values_sum;
  std::uint32_t table_sum;
  /// Of the five before it.
  std::uint32_t sum;
};

class Slot {
 public:
  /// Places in mapped memory: checksums of the chunks, values, data.
  struct Places {
    SlotRecord* record = nullptr;
    std::uint32_t* table = nullptr;
    std::byte* values = nullptr;
    std::uint64_t values_capacity = 0;
    std::byte* data = nullptr;
    std::uint64_t data_bytes = 0;
  };

  Slot() = default;
  explicit Slot(const Places& places) : at_(places) {}

  /// Copies `sources` one behind the other, as long as the data together, with their checksums.
  /// REQUIRES values that fit.
  void fill(const SavedStep& step, std::span<const std::span<const std::byte>> sources,
            std::string_view values, int num_threads);
  /// Nothing is in it any more.
  void discard();

  /// Nothing unless the slot is whole and record, table and values are as they were stored.
  std::optional<SavedStep> whole() const;
  /// REQUIRES whole().
  std::string values() const;
  std::uint32_t checksum(std::size_t chunk) const { return at_.table[chunk]; }
  std::span<const std::byte> data() const { return {at_.data, at_.data_bytes}; }
  std::span<const std::uint32_t> table() const;

  /// The writer holds a slot for a reader, who lets it go.
  void hold() { at_.record->held.store(1, std::memory_order_release); }
  void release() { at_.record->held.store(0, std::memory_order_release); }
  bool is_held() const { return at_.record->held.load(std::memory_order_acquire) != 0; }

 private:
  std::uint32_t sum_of_record() const;

  Places at_;
};

}  // namespace libddp
