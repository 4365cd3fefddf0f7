#pragma once

// One of the places of a SlotMemory: bytes of all pieces at one step of the training, their
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
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
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
  /// Drawn by the ranks that saved it, once for each start of them: two parts of a job that went on
  /// apart count alike. 0 in storage, where files name it.
  std::uint64_t start = 0;

  bool operator==(const SavedStep&) const = default;
};

/// Why a slot that was filled is not whole.
struct SlotDamage {
  /// Of what was in it, as far as that can be known.
  std::optional<SavedStep> saved;
  /// "its record is not as it was stored"
  std::string reason;
};

/// Words in shared memory, on cache lines of their own.
struct alignas(128) SlotRecord {
  std::atomic<std::uint64_t> state;
  /// How many read the slot, and whether its writer has reserved it: never both.
  std::atomic<std::uint64_t> held;
  std::int64_t step;
  std::uint64_t sequence;
  std::uint64_t start;
  std::uint64_t values_bytes;
  std::uint32_t values_sum;
  std::uint32_t table_sum;
  /// Of the six before it.
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
  /// Copies a chunk to where it belongs, and returns its checksum.
  using ChunkCopy = std::function<std::uint32_t(std::size_t index, std::byte* to)>;
  /// The same of chunks that come from somewhere else: `copy` is called once for each, by several
  /// threads, and begun in their order.
  void fill(const SavedStep& step, const ChunkCopy& copy, std::string_view values, int num_threads);
  /// The same in parts, for bytes that come one after another (SlotWriter): from begin() to
  /// finish() the slot is not whole, and space() and the checksums may be written. REQUIRES all of
  /// them, and values that fit, before finish().
  void begin();
  std::span<std::byte> space() { return {at_.data, at_.data_bytes}; }
  void set_checksum(std::size_t chunk, std::uint32_t sum) { at_.table[chunk] = sum; }
  void finish(const SavedStep& step, std::string_view values);
  /// Nothing is in it any more.
  void discard();

  /// Nothing unless the slot is whole and record, table and values are as they were stored.
  std::optional<SavedStep> whole() const;
  /// Of a slot that is not whole although its writer has finished it; nothing for one that is
  /// whole, empty or being written.
  std::optional<SlotDamage> damage() const;
  /// REQUIRES whole().
  std::string values() const;
  std::uint32_t checksum(std::size_t chunk) const { return at_.table[chunk]; }
  std::span<const std::byte> data() const { return {at_.data, at_.data_bytes}; }
  std::span<const std::uint32_t> table() const;

  /// A reader in another process than the writer: until release() nobody writes the slot. False
  /// where it is reserved; kReservedPause is a good time until the next try.
  bool try_hold();
  static constexpr std::chrono::milliseconds kReservedPause{2};
  void release();
  bool is_held() const { return num_readers() != 0; }
  /// The writer, before fill(): until unreserve() nobody comes to read. False while somebody does.
  bool try_reserve();
  /// Also for a writer that takes over from one that died.
  void unreserve();
  /// Forgets readers that died: REQUIRES that there is none.
  void forget_readers();

 private:
  std::uint64_t num_readers() const;
  bool is_record_sound() const;
  /// What is not as it was stored; null if all is. REQUIRES a sound record.
  const char* unsound_text() const;
  std::uint32_t sum_of_record() const;

  Places at_;
};

}  // namespace libddp
