#include "libddp/slots/slot_writer.h"

#include <fmt/format.h>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/kernels/crc32c.h"

namespace libddp {

SlotWriter::SlotWriter(SlotMemory& memory, int slot, const std::vector<std::uint32_t>& checksums)
    : memory_(memory), slot_(memory.slot(slot)) {
  LIBDDP_CHECK(checksums.size() == num_chunks(memory.layout().data_bytes()),
               "checksums of another layout");
  slot_.begin();
  for (std::size_t i = 0; i < checksums.size(); ++i) slot_.set_checksum(i, checksums[i]);
}

SlotWriter::~SlotWriter() {
  if (!is_finished_) slot_.discard();
}

std::span<std::byte> SlotWriter::space() const {
  const std::uint64_t data_bytes = memory_.layout().data_bytes();
  if (chunk_ == num_chunks(data_bytes)) return {};
  return slot_.space()
      .subspan(chunk_ * kChunkBytes, chunk_bytes(data_bytes, chunk_))
      .subspan(filled_);
}

void SlotWriter::advance(std::size_t bytes) {
  const std::span<std::byte> free = space();
  LIBDDP_CHECK(bytes <= free.size(), "more bytes than there is space for");
  // At once, while they are in a cache.
  sum_ = crc32c(free.data(), bytes, sum_);
  filled_ += bytes;
  if (bytes < free.size()) return;
  if (sum_ != slot_.checksum(chunk_)) {
    const std::uint64_t begin = chunk_ * kChunkBytes;
    throw SnapshotError(
        fmt::format("bytes {} to {} have another checksum than when they were stored ({})", begin,
                    begin + filled_, memory_.layout().describe(begin, begin + filled_)));
  }
  ++chunk_;
  filled_ = 0;
  sum_ = 0;
}

void SlotWriter::finish(const SavedStep& saved, std::string_view values) {
  LIBDDP_CHECK(space().empty(), "bytes are missing");
  slot_.finish(saved, values);
  is_finished_ = true;
}

}  // namespace libddp
