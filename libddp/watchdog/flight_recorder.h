#pragma once

// The last operations of a group: what, which number, when it was called, began and ended, and how.
// Always on: a ring of fixed size, no lock, no allocation, two or three clock reads an operation.
//
// Thread rule: any thread may write and read at any time. A reader skips an entry that is being
// written. An operation that ends after kCapacity newer ones have come is forgotten.
//
//   const FlightRecorder::Ticket ticket = recorder.add(description, sequence);
//   recorder.start(ticket);
//   recorder.finish(ticket, true);
//   for (const FlightRecorder::Record& record : recorder.records()) ...

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "libddp/base/monotonic_clock.h"
#include "libddp/base/op_description.h"

namespace libddp {

class FlightRecorder {
 public:
  static constexpr std::size_t kCapacity = 2048;
  static_assert((kCapacity & (kCapacity - 1)) == 0, "the ring is cut with a mask");

  enum class State : std::uint64_t { Queued, Running, Done, Failed };

  struct Record {
    /// Counts all operations of this rank, from 1.
    std::uint64_t number = 0;
    /// The collective's number, equal on all ranks; 0 for point to point.
    std::uint64_t sequence = 0;
    OpDescription operation;
    State state = State::Queued;
    // On monotonic_ns(); 0 = not yet.
    std::int64_t called_ns = 0;
    std::int64_t started_ns = 0;
    std::int64_t finished_ns = 0;
    /// What an accelerator itself took for it; 0 = not measured.
    std::int64_t device_ns = 0;
  };
  /// Number of a record; 0 = of nothing.
  using Ticket = std::uint64_t;

  FlightRecorder();

  Ticket add(const OpDescription& operation, std::uint64_t sequence) noexcept;
  /// As `add` and `start` at once, with one clock read.
  Ticket add_running(const OpDescription& operation, std::uint64_t sequence) noexcept;
  void start(Ticket ticket) noexcept;
  void finish(Ticket ticket, bool succeeded, std::int64_t device_ns = 0) noexcept;

  /// What is left of the last kCapacity, oldest first.
  std::vector<Record> records() const;
  std::uint64_t num_added() const { return next_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kWords = (sizeof(OpDescription) + 7) / 8;
  /// `number` is stored last and cleared first; zeros are an empty entry.
  struct Entry {
    std::atomic<std::uint64_t> number;
    std::atomic<std::uint64_t> sequence;
    std::atomic<std::uint64_t> state;
    std::atomic<std::int64_t> called_ns;
    std::atomic<std::int64_t> started_ns;
    std::atomic<std::int64_t> finished_ns;
    std::atomic<std::int64_t> device_ns;
    std::array<std::atomic<std::uint64_t>, kWords> words;
  };
  struct Release {
    void operator()(Entry* entries) const noexcept;
  };

  Ticket put(const OpDescription& operation, std::uint64_t sequence, State state) noexcept;
  Entry* entry_of(Ticket ticket) const noexcept;
  static bool read(const Entry& entry, Record& record);

  /// From calloc: pages that a group never reaches cost no memory.
  std::unique_ptr<Entry[], Release> ring_;
  std::atomic<std::uint64_t> next_{0};
};

const char* name(FlightRecorder::State state);

}  // namespace libddp
