#include "libddp/keeper/replica_receiver.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/slot_writer.h"

namespace libddp {
namespace {

/// Of a read, so that its bytes are summed up while they are in a cache.
constexpr std::size_t kReadBytes = 256u << 10;
/// Whoever looks at a slot for its step has done so by then; others read it.
constexpr int kReserveTries = 50;

/// A slot that nobody comes to read.
class ReservedSlot {
 public:
  explicit ReservedSlot(Slot& slot) : slot_(slot) {
    for (int i = 0; i < kReserveTries && !is_mine_; ++i) {
      if (i > 0) ::poll(nullptr, 0, 1);
      is_mine_ = slot_.try_reserve();
    }
  }
  ~ReservedSlot() {
    if (is_mine_) slot_.unreserve();
  }
  ReservedSlot(const ReservedSlot&) = delete;
  ReservedSlot& operator=(const ReservedSlot&) = delete;

  bool is_mine() const { return is_mine_; }

 private:
  Slot& slot_;
  bool is_mine_ = false;
};

void check_memory(std::uint64_t needed, const std::function<MemoryLimit()>& limit) {
  const MemoryLimit left = limit();
  if (needed <= left.available_bytes) return;
  throw SnapshotError(fmt::format(
      "it needs {} bytes of memory, {} has {} left. Hint: fewer replicas, or more memory", needed,
      left.source.empty() ? "this process" : left.source, left.available_bytes));
}

}  // namespace

KeptReplicas::Replica ReplicaReceiver::receive(const KeptReplicas::Replica& known,
                                               const std::function<MemoryLimit()>& limit) {
  receive_opening(limit);
  if (known.memory && fits(*known.memory)) {
    const int slot = 1 - known.newest_slot;
    const ReservedSlot reserved(known.memory->slot(slot));
    if (reserved.is_mine()) {
      if (!known.has_both) check_memory(head_.data_bytes, limit);
      receive_chunks(*known.memory, slot);
      return {.memory = known.memory, .newest_slot = slot, .has_both = true};
    }
  }
  check_memory(head_.data_bytes + head_.layout_bytes + head_.values_bytes, limit);
  auto memory = std::make_shared<SlotMemory>(SlotMemory::create(layout_,
                                                                {.run = place_.run,
                                                                 .rank = head_.rank,
                                                                 .world_size = head_.world_size,
                                                                 .generation = head_.generation},
                                                                head_.values_capacity));
  receive_chunks(*memory, 0);
  return {.memory = std::move(memory)};
}

void ReplicaReceiver::receive_opening(const std::function<MemoryLimit()>& limit) {
  const ReplicaRequest request = ReplicaRequest::make(place_);
  stream_.send(&request, sizeof(request));
  stream_.receive(&head_, sizeof(head_));
  head_.check();
  if (head_.outcome == ReplicaOutcome::Refused) {
    std::string reason(head_.reason_bytes, '\0');
    stream_.receive(reason.data(), reason.size());
    throw SnapshotError(printable(reason));
  }
  check_head(head_);
  const std::uint64_t table_bytes = num_chunks(head_.data_bytes) * sizeof(std::uint32_t);
  // Texts are parsed into about ten times their size.
  check_memory(10 * head_.layout_bytes + head_.values_bytes + table_bytes, limit);
  try {
    layout_ = PieceLayout::parse(receive_text(head_.layout_bytes, head_.layout_sum, "layout"));
  } catch (const SnapshotError& error) {
    throw SnapshotError(fmt::format("its layout is none: {}", error.what()));
  }
  if (layout_.data_bytes() != head_.data_bytes) {
    throw SnapshotError("its layout is for another size");
  }
  values_ = receive_text(head_.values_bytes, head_.values_sum, "values");
  checksums_.resize(num_chunks(head_.data_bytes));
  stream_.receive(checksums_.data(), table_bytes);
  if (crc32c(checksums_.data(), table_bytes) != head_.table_sum) {
    throw NetworkError("the checksums were damaged on their way");
  }
}

void ReplicaReceiver::check_head(const ReplicaHead& head) const {
  if (head.rank == place_.rank && head.generation == place_.generation &&
      head.sequence == place_.sequence) {
    return;
  }
  throw NetworkError(fmt::format(
      "it sent save {} of rank {}, layout {}, in place of {} of rank {}, "
      "layout {}",
      head.sequence, head.rank, head.generation, place_.sequence, place_.rank, place_.generation));
}

std::string ReplicaReceiver::receive_text(std::uint64_t bytes, std::uint32_t sum,
                                          const char* what) {
  std::string text(bytes, '\0');
  stream_.receive(text.data(), text.size());
  if (crc32c(text.data(), text.size()) == sum) return text;
  throw NetworkError(fmt::format("the {} was damaged on its way", what));
}

void ReplicaReceiver::receive_chunks(SlotMemory& memory, int slot) {
  SlotWriter writer(memory, slot, checksums_);
  while (!writer.space().empty()) {
    const std::size_t chunk = writer.chunk();
    ChunkHead head;
    stream_.receive(&head, sizeof(head));
    if (head.state == ChunkState::Lost) throw SnapshotError("it has lost the save in the middle");
    if (head.state != ChunkState::Comes || head.index != chunk) {
      throw NetworkError(fmt::format("something else came in place of chunk {}", chunk));
    }
    while (writer.chunk() == chunk && !writer.space().empty()) {
      const auto space = writer.space();
      writer.advance(stream_.receive_some(space.first(std::min(space.size(), kReadBytes))));
    }
  }
  writer.finish(head_.saved(), values_);
}

bool ReplicaReceiver::fits(const SlotMemory& memory) const {
  return memory.layout().text() == layout_.text() &&
         memory.values_capacity() == head_.values_capacity &&
         memory.identity().world_size == head_.world_size;
}

}  // namespace libddp
