#include "libddp/watchdog/flight_recorder.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

namespace libddp {

static_assert(std::is_trivially_copyable_v<OpDescription>);

void FlightRecorder::Release::operator()(Entry* entries) const noexcept { std::free(entries); }

FlightRecorder::FlightRecorder()
    : ring_(static_cast<Entry*>(std::calloc(kCapacity, sizeof(Entry)))) {
  if (!ring_) throw std::bad_alloc();
}

FlightRecorder::Ticket FlightRecorder::add(const OpDescription& operation,
                                           std::uint64_t sequence) noexcept {
  return put(operation, sequence, State::Queued);
}

FlightRecorder::Ticket FlightRecorder::add_running(const OpDescription& operation,
                                                   std::uint64_t sequence) noexcept {
  return put(operation, sequence, State::Running);
}

FlightRecorder::Ticket FlightRecorder::put(const OpDescription& operation, std::uint64_t sequence,
                                           State state) noexcept {
  const Ticket ticket = next_.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = ring_[ticket & (kCapacity - 1)];
  const std::int64_t now_ns = monotonic_ns();
  std::uint64_t words[kWords] = {};
  std::memcpy(words, &operation, sizeof(operation));
  entry.number.store(0, std::memory_order_relaxed);
  // Released one by one, so that a reader that sees one of the new words sees the zero, too.
  entry.sequence.store(sequence, std::memory_order_release);
  entry.state.store(static_cast<std::uint64_t>(state), std::memory_order_release);
  entry.called_ns.store(now_ns, std::memory_order_release);
  entry.started_ns.store(state == State::Running ? now_ns : 0, std::memory_order_release);
  entry.finished_ns.store(0, std::memory_order_release);
  entry.device_ns.store(0, std::memory_order_release);
  for (std::size_t i = 0; i < kWords; ++i) {
    entry.words[i].store(words[i], std::memory_order_release);
  }
  entry.number.store(ticket, std::memory_order_release);
  return ticket;
}

FlightRecorder::Entry* FlightRecorder::entry_of(Ticket ticket) const noexcept {
  if (ticket == 0) return nullptr;
  Entry& entry = ring_[ticket & (kCapacity - 1)];
  return entry.number.load(std::memory_order_relaxed) == ticket ? &entry : nullptr;
}

void FlightRecorder::start(Ticket ticket) noexcept {
  Entry* const entry = entry_of(ticket);
  if (entry == nullptr) return;
  entry->started_ns.store(monotonic_ns(), std::memory_order_relaxed);
  entry->state.store(static_cast<std::uint64_t>(State::Running), std::memory_order_relaxed);
}

void FlightRecorder::finish(Ticket ticket, bool succeeded, std::int64_t device_ns) noexcept {
  Entry* const entry = entry_of(ticket);
  if (entry == nullptr) return;
  const State state = succeeded ? State::Done : State::Failed;
  entry->finished_ns.store(monotonic_ns(), std::memory_order_relaxed);
  if (device_ns != 0) entry->device_ns.store(device_ns, std::memory_order_relaxed);
  entry->state.store(static_cast<std::uint64_t>(state), std::memory_order_relaxed);
}

bool FlightRecorder::read(const Entry& entry, Record& record) {
  record.number = entry.number.load(std::memory_order_acquire);
  if (record.number == 0) return false;
  record.sequence = entry.sequence.load(std::memory_order_acquire);
  record.state = static_cast<State>(entry.state.load(std::memory_order_acquire));
  record.called_ns = entry.called_ns.load(std::memory_order_acquire);
  record.started_ns = entry.started_ns.load(std::memory_order_acquire);
  record.finished_ns = entry.finished_ns.load(std::memory_order_acquire);
  record.device_ns = entry.device_ns.load(std::memory_order_acquire);
  std::uint64_t words[kWords];
  for (std::size_t i = 0; i < kWords; ++i) {
    words[i] = entry.words[i].load(std::memory_order_acquire);
  }
  std::memcpy(static_cast<void*>(&record.operation), words, sizeof(OpDescription));
  return entry.number.load(std::memory_order_relaxed) == record.number;
}

std::vector<FlightRecorder::Record> FlightRecorder::records() const {
  std::vector<Record> records;
  const std::uint64_t end = next_.load(std::memory_order_acquire);
  const std::uint64_t begin = end > kCapacity ? end - kCapacity : 0;
  for (std::uint64_t number = begin + 1; number <= end; ++number) {
    Record record;
    const Entry& entry = ring_[number & (kCapacity - 1)];
    if (read(entry, record) && record.number == number) records.push_back(record);
  }
  return records;
}

const char* name(FlightRecorder::State state) {
  switch (state) {
    case FlightRecorder::State::Queued:
      return "queued";
    case FlightRecorder::State::Running:
      return "running";
    case FlightRecorder::State::Done:
      return "done";
    case FlightRecorder::State::Failed:
      return "failed";
  }
  return "unknown";
}

}  // namespace libddp
