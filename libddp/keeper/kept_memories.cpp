#include "libddp/keeper/kept_memories.h"

#include <iterator>
#include <utility>

namespace libddp {
namespace {

bool has_whole_slot(const SlotMemory& memory) {
  return memory.slot(0).whole() || memory.slot(1).whole();
}

}  // namespace

void KeptMemories::put(SlotMemory memory) {
  if (!by_rank_.empty()) {
    const Memory& other = by_rank_.begin()->second.begin()->second;
    if (other->identity().world_size != memory.identity().world_size) by_rank_.clear();
  }
  auto& layouts = by_rank_[memory.identity().rank];
  layouts[memory.identity().generation] = std::make_shared<SlotMemory>(std::move(memory));
  forget_old();
}

void KeptMemories::forget_old() {
  for (auto& [rank, layouts] : by_rank_) {
    while (layouts.size() > 1 && has_whole_slot(*std::prev(layouts.end())->second)) {
      layouts.erase(layouts.begin());
    }
    // Begun and never finished, by starts that died: the newest, and the newest that has something.
    while (layouts.size() > 2) {
      const auto second = std::next(layouts.begin());
      layouts.erase(has_whole_slot(*second->second) ? layouts.begin() : second);
    }
  }
}

KeptMemories::Memory KeptMemories::find(int rank, std::uint64_t generation) const {
  const auto layouts = by_rank_.find(rank);
  if (layouts == by_rank_.end()) return nullptr;
  const auto found = layouts->second.find(generation);
  return found == layouts->second.end() ? nullptr : found->second;
}

std::vector<KeptMemories::Memory> KeptMemories::all() const {
  std::vector<Memory> found;
  for (const auto& [rank, layouts] : by_rank_) {
    for (const auto& [generation, memory] : layouts) found.push_back(memory);
  }
  return found;
}

std::optional<KeptMemories::Common> KeptMemories::newest_common() const {
  std::map<std::uint64_t, Common> by_sequence;
  for (const auto& [rank, layouts] : by_rank_) {
    for (const auto& [generation, memory] : layouts) {
      for (int i = 0; i < SlotMemory::kSlots; ++i) {
        const auto saved = memory->slot(i).whole();
        if (!saved) continue;
        Common& common = by_sequence[saved->sequence];
        common.saved = *saved;
        common.slots.emplace_back(memory, i);
      }
    }
  }
  for (auto common = by_sequence.rbegin(); common != by_sequence.rend(); ++common) {
    if (common->second.slots.size() == by_rank_.size()) return common->second;
  }
  return std::nullopt;
}

}  // namespace libddp
