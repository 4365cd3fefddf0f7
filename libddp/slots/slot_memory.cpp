#include "libddp/slots/slot_memory.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/kernels/crc32c.h"

namespace libddp {
namespace {

constexpr std::uint64_t kMagic = 0x31544f4c53504444ull;  // "DDPSLOT1"
constexpr std::uint32_t kVersion = 3;
constexpr std::uint64_t kPage = 4096;
/// Of data that fills them; transparent huge pages need both ends on such a boundary.
constexpr std::uint64_t kHugePage = 2u << 20;
constexpr std::uint64_t kRecords = 1024;

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t rank;
  std::int32_t world_size;
  std::uint32_t layout_sum;
  std::uint64_t generation;
  std::uint64_t layout_bytes;
  std::uint64_t data_bytes;
  std::uint64_t values_capacity;
  char run[64];
  /// Of everything before it.
  std::uint32_t sum;
  std::uint32_t unused;
};
static_assert(sizeof(Header) <= kRecords);
static_assert(kRecords + SlotMemory::kSlots * sizeof(SlotRecord) <= kPage);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

std::uint32_t sum_of(const Header& header) { return crc32c(&header, offsetof(Header, sum)); }

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// Offsets of what the memory has behind its first page.
struct Plan {
  std::uint64_t table[SlotMemory::kSlots];
  std::uint64_t values[SlotMemory::kSlots];
  std::uint64_t data[SlotMemory::kSlots];
  std::uint64_t size = 0;
  /// Without the spare slot's data, which are last.
  std::uint64_t size_without_spare = 0;

  Plan(std::uint64_t layout_bytes, std::uint64_t data_bytes, std::uint64_t values_capacity) {
    size = kPage + rounded(layout_bytes, kPage);
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      table[i] = size;
      size += rounded(num_chunks(data_bytes) * sizeof(std::uint32_t), kPage);
      values[i] = size;
      size += rounded(values_capacity, kPage);
    }
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      if (i == SlotMemory::kSpare) size_without_spare = size;
      size = rounded(size, data_bytes >= kHugePage ? kHugePage : kPage);
      data[i] = size;
      size += rounded(data_bytes, kPage);
    }
  }
};

Slot slot_at(std::byte* memory, const Plan& plan, int index, const PieceLayout& layout,
             std::uint64_t values_capacity) {
  auto* records = std::launder(reinterpret_cast<SlotRecord*>(memory + kRecords));
  return Slot({.record = records + index,
               .table = reinterpret_cast<std::uint32_t*>(memory + plan.table[index]),
               .values = memory + plan.values[index],
               .values_capacity = values_capacity,
               .data = memory + plan.data[index],
               .data_bytes = layout.data_bytes()});
}

[[noreturn]] void refuse(const std::string& why) {
  throw SnapshotError(fmt::format("libddp snapshot: this memory holds no snapshot: {}.", why));
}

Header checked_header(const SharedSegment& segment) {
  if (segment.size_bytes() < kPage) refuse(fmt::format("it has {} bytes", segment.size_bytes()));
  Header header;
  std::memcpy(&header, segment.data(), sizeof(header));
  if (header.magic != kMagic) refuse("it is something else");
  if (header.version != kVersion) {
    refuse(fmt::format("it is of version {}, this is version {}", header.version, kVersion));
  }
  if (header.sum != sum_of(header)) refuse("its header has another checksum");
  // Below this no sum of sizes overflows.
  constexpr std::uint64_t kLimit = 1ull << 60;
  if (header.layout_bytes > PieceLayout::kMaxTextBytes || header.data_bytes > kLimit ||
      header.values_capacity > kLimit ||
      Plan(header.layout_bytes, header.data_bytes, header.values_capacity).size !=
          segment.size_bytes()) {
    refuse("its sizes are not those of its header");
  }
  if (header.rank < 0 || header.rank >= header.world_size ||
      std::memchr(header.run, 0, sizeof(header.run)) == nullptr) {
    refuse("its header misstates whose it is");
  }
  return header;
}

PieceLayout checked_layout(const SharedSegment& segment, const Header& header) {
  const std::string_view text(reinterpret_cast<const char*>(segment.data() + kPage),
                              header.layout_bytes);
  if (crc32c(text.data(), text.size()) != header.layout_sum) {
    refuse(fmt::format("its layout has another checksum; it was that of rank {} of {}", header.rank,
                       header.world_size));
  }
  try {
    PieceLayout layout = PieceLayout::parse(text);
    if (layout.data_bytes() != header.data_bytes) refuse("its layout is for another size");
    return layout;
  } catch (const SnapshotError& error) {
    refuse(error.what());
  }
}

}  // namespace

std::uint64_t SlotMemory::bytes_needed(const PieceLayout& layout, std::uint64_t values_capacity) {
  return Plan(layout.text().size(), layout.data_bytes(), values_capacity).size_without_spare;
}

std::uint64_t SlotMemory::bytes_mapped(const PieceLayout& layout, std::uint64_t values_capacity) {
  return Plan(layout.text().size(), layout.data_bytes(), values_capacity).size;
}

SlotMemory::Range SlotMemory::data_of_first_save(const PieceLayout& layout,
                                                 std::uint64_t values_capacity) {
  const Plan plan(layout.text().size(), layout.data_bytes(), values_capacity);
  return {.begin = plan.data[0], .bytes = layout.data_bytes()};
}

SlotMemory SlotMemory::create(PieceLayout layout, const SlotIdentity& identity,
                              std::uint64_t values_capacity, SharedSegment reserved) {
  Header header{.magic = kMagic,
                .version = kVersion,
                .rank = identity.rank,
                .world_size = identity.world_size,
                .layout_sum = crc32c(layout.text().data(), layout.text().size()),
                .generation = identity.generation,
                .layout_bytes = layout.text().size(),
                .data_bytes = layout.data_bytes(),
                .values_capacity = values_capacity,
                .run = {},
                .sum = 0,
                .unused = 0};
  LIBDDP_CHECK(identity.run.size() < sizeof(header.run), "the name of the run is too long");
  identity.run.copy(header.run, identity.run.size());
  header.sum = sum_of(header);
  const std::uint64_t size_bytes = bytes_mapped(layout, values_capacity);
  SharedSegment segment = std::move(reserved);
  if (segment.size_bytes() >= size_bytes) {
    segment.seal_at(size_bytes);
  } else {
    segment = SharedSegment::create("libddp-snapshot", size_bytes);
  }
  std::memcpy(segment.data() + kPage, layout.text().data(), layout.text().size());
  std::memcpy(segment.data(), &header, sizeof(header));
  return {std::move(segment), std::move(layout), identity, values_capacity};
}

SlotMemory SlotMemory::open(UniqueFd fd) {
  SharedSegment segment;
  try {
    segment = SharedSegment::map(std::move(fd));
  } catch (const NetworkError& error) {
    refuse(error.what());
  }
  const Header header = checked_header(segment);
  PieceLayout layout = checked_layout(segment, header);
  SlotIdentity identity{.run = header.run,
                        .rank = header.rank,
                        .world_size = header.world_size,
                        .generation = header.generation};
  return {std::move(segment), std::move(layout), std::move(identity), header.values_capacity};
}

void SlotMemory::check() const { checked_layout(segment_, checked_header(segment_)); }

SlotMemory::SlotMemory(SharedSegment segment, PieceLayout layout, SlotIdentity identity,
                       std::uint64_t values_capacity)
    : segment_(std::move(segment)),
      layout_(std::move(layout)),
      identity_(std::move(identity)),
      values_capacity_(values_capacity) {
  const Plan plan(layout_.text().size(), layout_.data_bytes(), values_capacity);
  for (int i = 0; i < kSlots; ++i) {
    slot(i) = slot_at(segment_.data(), plan, i, layout_, values_capacity);
  }
}

std::string SlotSource::name() const {
  const auto step = memory_.slot(slot_).whole();
  return fmt::format("the memory of rank {} of {}{}", memory_.identity().rank,
                     memory_.identity().world_size,
                     step ? fmt::format(" at step {}", step->step) : "");
}

}  // namespace libddp
