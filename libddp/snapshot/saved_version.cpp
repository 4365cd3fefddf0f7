#include "libddp/snapshot/saved_version.h"

#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/slots/read_plan.h"
#include "libddp/slots/scatter.h"

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
  std::string name() const override { return source_.name(); }

 private:
  const std::shared_ptr<const SlotMemory> memory_;
  const SlotSource source_;
};

/// Tensors that the CPU can be given bytes for: themselves, or copies that go back in the end.
class Destinations {
 public:
  explicit Destinations(const std::vector<SnapshotTensor>& tensors) {
    for (const SnapshotTensor& each : tensors) {
      each.check();
      const at::Tensor tensor = each.tensor.detach();
      const bool is_plain = tensor.is_cpu() && tensor.is_contiguous();
      const at::Tensor host = is_plain ? tensor
                                       : at::empty_like(tensor, tensor.options().device(at::kCPU),
                                                        at::MemoryFormat::Contiguous);
      if (!is_plain) copies_.emplace_back(tensor, host);
      wanted_.push_back({.key = each.key,
                         .dtype = std::string(stored_dtype(tensor.scalar_type())),
                         .shape = each.shape,
                         .begin = each.begin,
                         .end = each.end,
                         .to = static_cast<std::byte*>(host.mutable_data_ptr())});
    }
  }

  const std::vector<WantedPiece>& wanted() const { return wanted_; }
  void finish() const {
    for (const auto& [tensor, host] : copies_) tensor.copy_(host);
  }

 private:
  std::vector<WantedPiece> wanted_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace

SavedVersion SavedVersion::in_memory(const SavedStep& saved, int world_size,
                                     std::uint64_t generation, std::vector<Place> places) {
  SavedVersion version;
  version.saved_ = saved;
  version.world_size_ = world_size;
  version.generation_ = generation;
  version.places_ = std::move(places);
  return version;
}

SavedVersion SavedVersion::on_storage(SnapshotFolder folder, SnapshotFolder::Entry entry) {
  SavedVersion version;
  version.saved_ = entry.saved;
  version.folder_ = std::make_shared<SnapshotFolder>(std::move(folder));
  version.entry_ = std::make_shared<SnapshotFolder::Entry>(std::move(entry));
  return version;
}

std::string SavedVersion::name() const {
  return entry_ ? entry_->path : fmt::format("memory, step {}", saved_.step);
}

void SavedVersion::open(int rank) {
  if (is_open_) return;
  const auto keep_values = [&](int of_rank, const std::string& values) {
    if (sources_.size() == 1 || of_rank == rank) values_ = values;
  };
  for (const Place& place : places_) {
    add_source(std::make_shared<KeptSlotSource>(place.memory, place.slot));
    keep_values(place.memory->identity().rank, place.memory->slot(place.slot).values());
  }
  if (entry_) {
    const SnapshotIndex index = folder_->read(*entry_);
    world_size_ = index.world_size;
    for (const StoredRank& stored : index.ranks) {
      add_source(std::make_shared<FileSource>(folder_->open(*entry_, stored)));
      keep_values(stored.rank, stored.values);
    }
  }
  is_open_ = true;
}

void SavedVersion::add_source(std::shared_ptr<const ChunkSource> source) {
  for (const Piece& piece : source->layout().pieces()) pieces_.emplace(piece.key, piece);
  sources_.push_back(std::move(source));
}

void SavedVersion::read(const std::vector<SnapshotTensor>& tensors, int num_threads) const {
  const bool has_all = static_cast<int>(sources_.size()) == world_size_;
  if (has_all) {
    for (const SnapshotTensor& each : tensors) {
      if (pieces_.contains(each.key)) continue;
      throw ArgumentError(fmt::format(
          "libddp snapshot: {} has no '{}'. Hint: load into the model and optimizer that "
          "were saved.",
          name(), each.key));
    }
  }
  const Destinations destinations(tensors);
  std::vector<const PieceLayout*> layouts;
  for (const auto& source : sources_) layouts.push_back(&source->layout());
  const ReadPlan plan = plan_read(destinations.wanted(), layouts);
  if (!plan.missing.empty()) {
    throw SnapshotError(fmt::format("libddp snapshot: {} has {} not here.", name(), plan.missing));
  }
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    scatter(*sources_[i], plan.segments[i], num_threads);
  }
  destinations.finish();
}

}  // namespace libddp
