#include "libddp/slots/scatter.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/chunk_threads.h"

namespace libddp {
namespace {

/// What of a chunk goes to memory that the CPU cannot write, and the place where it waits.
class Outgoing {
 public:
  explicit Outgoing(IndirectMemory* memory) : memory_(memory) {}
  ~Outgoing() {
    if (place_ != nullptr) memory_->give_back(place_);
  }
  Outgoing(const Outgoing&) = delete;
  Outgoing& operator=(const Outgoing&) = delete;

  /// Where the CPU writes bytes of the chunk that belong to `to`.
  std::byte* route(std::byte* to, std::uint64_t at, std::uint64_t bytes) {
    if (memory_ == nullptr || !memory_->has(to)) return to;
    if (place_ == nullptr) place_ = memory_->take_place();
    pieces_.push_back({.at = at, .to = to, .bytes = bytes});
    return place_ + at;
  }
  void send() {
    if (place_ != nullptr) memory_->send(place_, pieces_);
  }

 private:
  IndirectMemory* const memory_;
  std::byte* place_ = nullptr;
  std::vector<IndirectMemory::Piece> pieces_;
};

class Scattering {
 public:
  Scattering(const ChunkSource& source, std::vector<Segment> segments,
             IndirectMemory* indirect = nullptr)
      : source_(source), segments_(std::move(segments)), indirect_(indirect) {
    std::erase_if(segments_, [](const Segment& segment) { return segment.bytes == 0; });
    std::sort(segments_.begin(), segments_.end(),
              [](const Segment& one, const Segment& other) { return one.offset < other.offset; });
    std::uint64_t reached = 0;
    for (const Segment& segment : segments_) {
      LIBDDP_CHECK(segment.offset >= reached, "segments overlap");
      reached = segment.offset + segment.bytes;
    }
    LIBDDP_CHECK(reached <= source.layout().data_bytes(), "a segment outside of the data");
  }

  /// Numbers of the chunks that have something of a segment.
  std::vector<std::size_t> wanted() const {
    std::vector<std::size_t> found;
    for (const Segment& segment : segments_) {
      std::size_t i = static_cast<std::size_t>(segment.offset / kChunkBytes);
      if (!found.empty()) i = std::max(i, found.back() + 1);
      for (; i * kChunkBytes < segment.offset + segment.bytes; ++i) found.push_back(i);
    }
    return found;
  }

  void run(std::size_t index) const {
    std::vector<std::byte> scratch;
    const std::span<const std::byte> bytes = source_.chunk(index, scratch);
    const std::uint64_t begin = index * kChunkBytes;
    std::uint64_t reached = begin;
    std::uint32_t sum = 0;
    Outgoing outgoing(indirect_);
    const auto skip_to = [&](std::uint64_t to) {
      sum = crc32c(bytes.data() + (reached - begin), to - reached, sum);
      reached = to;
    };
    for (auto segment = first_behind(begin);
         segment != segments_.end() && segment->offset < begin + bytes.size(); ++segment) {
      const std::uint64_t from = std::max(segment->offset, begin);
      const std::uint64_t to = std::min(segment->offset + segment->bytes, begin + bytes.size());
      skip_to(from);
      std::byte* const target =
          outgoing.route(segment->to + (from - segment->offset), from - begin, to - from);
      sum = copy_with_crc32c(target, bytes.data() + (from - begin), to - from, sum);
      reached = to;
    }
    skip_to(begin + bytes.size());
    if (sum != source_.checksum(index)) fail(index, bytes.size());
    outgoing.send();
  }

 private:
  /// The first segment that ends behind `offset`.
  std::vector<Segment>::const_iterator first_behind(std::uint64_t offset) const {
    return std::partition_point(segments_.begin(), segments_.end(), [&](const Segment& segment) {
      return segment.offset + segment.bytes <= offset;
    });
  }

  [[noreturn]] void fail(std::size_t index, std::size_t bytes) const {
    const std::uint64_t begin = index * kChunkBytes;
    throw SnapshotError(fmt::format(
        "libddp snapshot: {} is damaged: bytes {} to {} have another checksum than when they were "
        "stored ({}).",
        source_.name(), begin, begin + bytes, source_.layout().describe(begin, begin + bytes)));
  }

  const ChunkSource& source_;
  std::vector<Segment> segments_;
  IndirectMemory* const indirect_;
};

}  // namespace

void scatter(const ChunkSource& source, std::vector<Segment> segments, int num_threads,
             IndirectMemory* indirect) {
  const Scattering scattering(source, std::move(segments), indirect);
  const std::vector<std::size_t> wanted = scattering.wanted();
  for_each_chunk(wanted.size(), source.num_readers(num_threads),
                 [&](std::size_t i) { scattering.run(wanted[i]); });
}

void verify(const ChunkSource& source, int num_threads) {
  const Scattering scattering(source, {});
  for_each_chunk(num_chunks(source.layout().data_bytes()), source.num_readers(num_threads),
                 [&](std::size_t i) { scattering.run(i); });
}

std::vector<Damage> find_damage(const ChunkSource& source, int num_threads) {
  const std::uint64_t data_bytes = source.layout().data_bytes();
  std::vector<char> is_damaged(num_chunks(data_bytes));
  for_each_chunk(is_damaged.size(), source.num_readers(num_threads), [&](std::size_t i) {
    std::vector<std::byte> scratch;
    const std::span<const std::byte> bytes = source.chunk(i, scratch);
    is_damaged[i] = crc32c(bytes.data(), bytes.size()) != source.checksum(i);
  });
  std::vector<Damage> found;
  for (std::size_t i = 0; i < is_damaged.size(); ++i) {
    if (!is_damaged[i]) continue;
    const std::uint64_t begin = i * kChunkBytes;
    if (found.empty() || found.back().end != begin) found.push_back({.begin = begin, .end = begin});
    found.back().end = begin + chunk_bytes(data_bytes, i);
  }
  return found;
}

}  // namespace libddp
