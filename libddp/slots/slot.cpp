#include "libddp/slots/slot.h"

#include <cstring>
#include <vector>

#include "libddp/base/check.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/chunk_parts.h"
#include "libddp/slots/chunk_source.h"
#include "libddp/slots/chunk_threads.h"

namespace libddp {
namespace {

/// Far from each other and from zero, so that a flipped bit makes none of another.
constexpr std::uint64_t kWriting = 0x5752495445ull;
constexpr std::uint64_t kWhole = 0xA1574F4C45ull;
constexpr std::uint64_t kEmpty = 0;
/// In `held`, above the number of readers.
constexpr std::uint64_t kReserved = 1ull << 63;

/// Nothing behind it becomes visible before anything ahead of it.
void full_barrier() {
#ifdef __SANITIZE_THREAD__
  // It knows no fences; to it a slot has one writer, whose words are atomic.
  static std::atomic<int> word{0};
  word.fetch_add(1);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

std::vector<std::uint64_t> sizes_of(std::span<const std::span<const std::byte>> sources) {
  std::vector<std::uint64_t> sizes;
  for (const auto& source : sources) sizes.push_back(source.size());
  return sizes;
}

}  // namespace

void Slot::fill(const SavedStep& step, std::span<const std::span<const std::byte>> sources,
                std::string_view values, int num_threads) {
  const ChunkParts parts(sizes_of(sources));
  LIBDDP_CHECK(parts.total() == at_.data_bytes, "sources of another size than the layout");
  const auto copy = [&](std::size_t index, std::byte* to) {
    return parts.copy(index, to, [&](const ChunkParts::Part& part) {
      return sources[part.source].data() + part.from;
    });
  };
  fill(step, copy, values, num_threads);
}

void Slot::fill(const SavedStep& step, const ChunkCopy& copy, std::string_view values,
                int num_threads) {
  LIBDDP_CHECK(values.size() <= at_.values_capacity, "values that do not fit");
  begin();
  for_each_chunk(num_chunks(at_.data_bytes), num_threads,
                 [&](std::size_t i) { at_.table[i] = copy(i, at_.data + i * kChunkBytes); });
  finish(step, values);
}

void Slot::begin() {
  at_.record->state.store(kWriting, std::memory_order_relaxed);
  // Nothing that is written next may become visible before the state does.
  full_barrier();
}

void Slot::finish(const SavedStep& step, std::string_view values) {
  LIBDDP_CHECK(values.size() <= at_.values_capacity, "values that do not fit");
  SlotRecord& record = *at_.record;
  if (!values.empty()) std::memcpy(at_.values, values.data(), values.size());
  record.step = step.step;
  record.sequence = step.sequence;
  record.start = step.start;
  record.values_bytes = values.size();
  record.values_sum = crc32c(values.data(), values.size());
  record.table_sum = crc32c(at_.table, table().size_bytes());
  record.sum = sum_of_record();
  // The copies may have gone past the caches: the fence puts them before the word.
  full_barrier();
  record.state.store(kWhole, std::memory_order_release);
}

void Slot::discard() {
  at_.record->state.store(kEmpty, std::memory_order_relaxed);
  full_barrier();
}

std::optional<SavedStep> Slot::whole() const {
  const SlotRecord& record = *at_.record;
  if (record.state.load(std::memory_order_acquire) != kWhole) return std::nullopt;
  if (!is_record_sound() || unsound_text() != nullptr) return std::nullopt;
  return SavedStep{record.step, record.sequence, record.start};
}

std::optional<SlotDamage> Slot::damage() const {
  const SlotRecord& record = *at_.record;
  const std::uint64_t state = record.state.load(std::memory_order_acquire);
  if (state == kEmpty || state == kWriting) return std::nullopt;
  const std::uint64_t sequence = record.sequence;
  SlotDamage damage;
  if (is_record_sound()) damage.saved = SavedStep{record.step, sequence, record.start};
  const char* const unsound = !damage.saved     ? "its record"
                              : state != kWhole ? "its state"
                                                : unsound_text();
  // Its writer may have come meanwhile: then the bytes are those of two saves, and fine.
  full_barrier();
  const bool is_the_same =
      record.state.load(std::memory_order_acquire) == state && record.sequence == sequence;
  if (!unsound || !is_the_same) return std::nullopt;
  damage.reason = std::string(unsound) + " is not as it was stored";
  return damage;
}

std::string Slot::values() const {
  return {reinterpret_cast<const char*>(at_.values),
          static_cast<std::size_t>(at_.record->values_bytes)};
}

std::span<const std::uint32_t> Slot::table() const {
  return {at_.table, num_chunks(at_.data_bytes)};
}

bool Slot::try_hold() {
  std::uint64_t held = at_.record->held.load(std::memory_order_relaxed);
  while ((held & kReserved) == 0) {
    if (at_.record->held.compare_exchange_weak(held, held + 1)) return true;
  }
  return false;
}

void Slot::release() { at_.record->held.fetch_sub(1); }

bool Slot::try_reserve() {
  std::uint64_t free = 0;
  return at_.record->held.compare_exchange_strong(free, kReserved);
}

void Slot::unreserve() { at_.record->held.fetch_and(~kReserved); }

void Slot::forget_readers() { at_.record->held.fetch_and(kReserved); }

std::uint64_t Slot::num_readers() const {
  return at_.record->held.load(std::memory_order_acquire) & ~kReserved;
}

bool Slot::is_record_sound() const {
  const SlotRecord& record = *at_.record;
  return record.sum == sum_of_record() && record.values_bytes <= at_.values_capacity;
}

const char* Slot::unsound_text() const {
  const SlotRecord& record = *at_.record;
  if (record.values_sum != crc32c(at_.values, record.values_bytes)) return "its text of values";
  if (record.table_sum != crc32c(at_.table, table().size_bytes())) return "its table of checksums";
  return nullptr;
}

std::uint32_t Slot::sum_of_record() const {
  const SlotRecord& record = *at_.record;
  struct Fields {
    std::int64_t step;
    std::uint64_t sequence;
    std::uint64_t start;
    std::uint64_t values_bytes;
    std::uint32_t values_sum;
    std::uint32_t table_sum;
  };
  const Fields fields{record.step,         record.sequence,   record.start,
                      record.values_bytes, record.values_sum, record.table_sum};
  static_assert(sizeof(Fields) == 40, "padding would be summed");
  return crc32c(&fields, sizeof(fields));
}

}  // namespace libddp
