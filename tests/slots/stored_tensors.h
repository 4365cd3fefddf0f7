#pragma once

// Tensors of bytes in ordinary memory, and their way into a slot and back.
//
//   StoredTensors tensors({"w", "m"}, 1000);
//   SlotMemory memory = tensors.memory();
//   tensors.fill(1);
//   tensors.store(memory, 0, {.step = 7, .sequence = 1});

#include <cstddef>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "libddp/slots/scatter.h"
#include "libddp/slots/slot_memory.h"

namespace libddp::test {

class StoredTensors {
 public:
  StoredTensors(std::vector<std::string> keys, std::size_t bytes_each)
      : keys_(std::move(keys)), data_(keys_.size(), std::vector<std::byte>(bytes_each)) {
    fill(0);
  }

  PieceLayout layout() const {
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const auto numel = static_cast<std::int64_t>(data_[i].size());
      pieces.push_back(
          {.key = keys_[i], .dtype = "U8", .shape = {numel}, .begin = 0, .end = numel});
    }
    return PieceLayout::of(std::move(pieces));
  }

  SlotMemory memory() const {
    return SlotMemory::create(layout(), {.run = "job 7", .rank = 1, .world_size = 4}, 4096);
  }

  void fill(unsigned seed) {
    std::mt19937 random(seed);
    for (auto& tensor : data_) {
      for (std::byte& byte : tensor) byte = static_cast<std::byte>(random());
    }
  }

  void store(SlotMemory& memory, int slot, const SavedStep& step,
             const std::string& values = "{}") const {
    const std::vector<std::span<const std::byte>> sources(data_.begin(), data_.end());
    memory.slot(slot).fill(step, sources, values, 2);
  }

  std::vector<Segment> segments(const PieceLayout& layout) {
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const Piece& piece = *layout.find(keys_[i]);
      segments.push_back({.offset = piece.offset, .bytes = piece.bytes, .to = data_[i].data()});
    }
    return segments;
  }

  const std::vector<std::vector<std::byte>>& bytes() const { return data_; }

  /// Whether no reader of slot 0 looks at that byte of the memory.
  bool is_unused(const SlotMemory& memory, std::uint64_t at) const {
    const auto offset_of = [&](const void* pointer) {
      return static_cast<std::uint64_t>(static_cast<const std::byte*>(pointer) - memory.data());
    };
    const Slot& slot = memory.slot(0);
    const auto is_in = [&](std::uint64_t begin, std::uint64_t bytes) {
      return at >= begin && at < begin + bytes;
    };
    // The header (its last word is padding), the first record up to its checksum but for the word
    // `held`, layout, table, values, data.
    return !is_in(0, 124) && !is_in(1024, 8) && !is_in(1040, 44) &&
           !is_in(4096, memory.layout().text().size()) &&
           !is_in(offset_of(slot.table().data()), slot.table().size_bytes()) &&
           !is_in(offset_of(slot.data().data()), slot.data().size());
  }

 private:
  std::vector<std::string> keys_;
  std::vector<std::vector<std::byte>> data_;
};

}  // namespace libddp::test
