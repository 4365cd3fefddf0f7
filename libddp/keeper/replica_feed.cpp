#include "libddp/keeper/replica_feed.h"

#include <utility>

#include "libddp/kernels/crc32c.h"

namespace libddp {
namespace {

template <typename Message>
std::string bytes_of(const Message& message) {
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

/// The head, and all that stands before the chunks.
std::string opening_of(const HeldSave& held) {
  const SlotMemory& memory = held.memory();
  const std::string values = held.slot().values();
  const std::string& layout = memory.layout().text();
  const auto table = held.slot().table();
  ReplicaHead head;
  head.rank = memory.identity().rank;
  head.world_size = memory.identity().world_size;
  head.generation = memory.identity().generation;
  head.step = held.saved().step;
  head.sequence = held.saved().sequence;
  head.start = held.saved().start;
  head.layout_bytes = layout.size();
  head.data_bytes = memory.layout().data_bytes();
  head.values_capacity = memory.values_capacity();
  head.values_bytes = values.size();
  head.layout_sum = crc32c(layout.data(), layout.size());
  head.values_sum = crc32c(values.data(), values.size());
  head.table_sum = crc32c(table.data(), table.size_bytes());
  head.seal();
  std::string text = bytes_of(head) + layout + values;
  text.append(reinterpret_cast<const char*>(table.data()), table.size_bytes());
  return text;
}

std::string refusal_text(const std::string& reason) {
  const std::string shown = reason.substr(0, ReplicaHead::kMaxReasonBytes);
  ReplicaHead head;
  head.outcome = ReplicaOutcome::Refused;
  head.reason_bytes = static_cast<std::uint32_t>(shown.size());
  head.seal();
  return bytes_of(head) + shown;
}

}  // namespace

ReplicaFeed::ReplicaFeed(HeldSave held) : held_(std::move(held)), text_(opening_of(held_)) {
  show_text();
}

ReplicaFeed::ReplicaFeed(const std::string& refusal) : text_(refusal_text(refusal)) { show_text(); }

void ReplicaFeed::advance(std::size_t bytes) {
  rest_ = rest_.subspan(bytes);
  if (rest_.empty()) next();
}

void ReplicaFeed::next() {
  const bool was_chunk = part_ == Part::Chunk;
  if (part_ == Part::ChunkHead) {
    part_ = Part::Chunk;
    const auto data = held_.slot().data();
    rest_ = data.subspan(chunk_ * kChunkBytes, chunk_bytes(data.size(), chunk_));
    return;
  }
  chunk_ += was_chunk ? 1 : 0;
  const std::size_t count = held_ ? num_chunks(held_.memory().layout().data_bytes()) : 0;
  const bool is_over = part_ == Part::End || chunk_ == count;
  part_ = is_over ? Part::End : Part::ChunkHead;
  if (!is_over) show_chunk_head();
}

void ReplicaFeed::show_chunk_head() {
  ChunkHead head;
  head.index = chunk_;
  // Its writer keeps away; what happens to the memory itself shows here and in the checksums.
  if (held_.slot().whole() != held_.saved()) {
    head.state = ChunkState::Lost;
    part_ = Part::End;
  }
  text_ = bytes_of(head);
  show_text();
}

}  // namespace libddp
