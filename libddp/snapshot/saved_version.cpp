#include "libddp/snapshot/saved_version.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// Keeps the memory that it reads.
class KeptSlotSource final : public ChunkSource {
 public:
  KeptSlotSource(std::shared_ptr<const SlotMemory> memory, int slot)
      : memory_(std::move(memory)), source_(*memory_, slot) {}

  const PieceLayout& layout() const override { return source_.layout(); }
  std::uint32_t checksum(std::size_t index) const override { return source_.checksum(index); }
  std::span<const std::byte> chunk(std::size_t index,
                                   std::vector<std::byte>& scratch) const override {
    return source_.chunk(index, scratch);
  }
  bool stays() const override { return source_.stays(); }
  std::string name() const override { return source_.name(); }

 private:
  const std::shared_ptr<const SlotMemory> memory_;
  const SlotSource source_;
};

}  // namespace

SavedVersion SavedVersion::in_memory(const SavedStep& saved, int world_size,
                                     std::uint64_t generation) {
  SavedVersion version;
  version.saved_ = saved;
  version.world_size_ = world_size;
  version.generation_ = generation;
  return version;
}

SavedVersion SavedVersion::on_storage(std::shared_ptr<const SnapshotStore> store,
                                      SnapshotStore::Entry entry) {
  SavedVersion version;
  version.saved_ = entry.saved;
  version.store_ = std::move(store);
  version.entry_ = std::make_shared<SnapshotStore::Entry>(std::move(entry));
  return version;
}

void SavedVersion::find_places(const std::vector<std::shared_ptr<SlotMemory>>& memories) {
  is_open_ = false;
  places_.clear();
  for (const auto& memory : memories) {
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      const bool is_of_it =
          memory->identity().generation == generation_ && memory->slot(i).whole() == saved_;
      if (is_of_it) places_.push_back({memory, i});
    }
  }
}

std::string SavedVersion::name() const {
  return entry_ ? entry_->path : fmt::format("memory, step {}", saved_.step);
}

void SavedVersion::open(int rank) {
  if (is_open_) return;
  sources_.clear();
  pieces_.clear();
  const auto keep_values = [&](int of_rank, const std::string& values) {
    if (sources_.size() == 1 || of_rank == rank) values_ = values;
  };
  for (const Place& place : places_) {
    add_source(std::make_shared<KeptSlotSource>(place.memory, place.slot));
    keep_values(place.memory->identity().rank, place.memory->slot(place.slot).values());
  }
  if (entry_) {
    const SnapshotIndex index = store_->read(*entry_);
    world_size_ = index.world_size;
    for (const StoredRank& stored : index.ranks) {
      add_source(store_->source(*entry_, stored));
      keep_values(stored.rank, stored.values);
    }
  }
  is_open_ = true;
}

std::string SavedVersion::piece_text() const {
  std::vector<Piece> all;
  for (const auto& [key, piece] : pieces_) all.push_back(piece);
  return PieceLayout::of(std::move(all)).text();
}

void SavedVersion::add_pieces(const std::string& text) {
  const PieceLayout layout = PieceLayout::parse(text);
  for (const Piece& piece : layout.pieces()) pieces_.emplace(piece.key, piece);
}

void SavedVersion::add_source(std::shared_ptr<const ChunkSource> source) {
  for (const Piece& piece : source->layout().pieces()) pieces_.emplace(piece.key, piece);
  sources_.push_back(std::move(source));
}

}  // namespace libddp
