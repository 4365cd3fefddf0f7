#include "libddp/keeper/kept_memories.h"

#include <iterator>
#include <utility>

namespace libddp {

void KeptMemories::put(SlotMemory memory) {
  auto& by_rank = generations_[memory.identity().generation];
  const int rank = memory.identity().rank;
  by_rank[rank] = std::make_shared<SlotMemory>(std::move(memory));
  forget_old();
}

void KeptMemories::forget_old() {
  auto newest_whole = generations_.end();
  for (auto each = generations_.begin(); each != generations_.end(); ++each) {
    if (!common_of(each->second).empty()) newest_whole = each;
  }
  if (newest_whole != generations_.end()) {
    generations_.erase(generations_.begin(), newest_whole);
    newest_whole = generations_.begin();
  }
  // Begun and never finished: only the newest of them may still be.
  const auto first =
      newest_whole == generations_.end() ? generations_.begin() : std::next(newest_whole);
  if (first != generations_.end()) generations_.erase(first, std::prev(generations_.end()));
}

void KeptMemories::forget_rank(int rank) {
  for (auto each = generations_.begin(); each != generations_.end();) {
    each->second.erase(rank);
    each = each->second.empty() ? generations_.erase(each) : std::next(each);
  }
}

KeptMemories::Memory KeptMemories::find(int rank, std::uint64_t generation) const {
  const auto by_rank = generations_.find(generation);
  if (by_rank == generations_.end()) return nullptr;
  const auto found = by_rank->second.find(rank);
  return found == by_rank->second.end() ? nullptr : found->second;
}

std::vector<KeptMemories::Memory> KeptMemories::all() const {
  std::vector<Memory> found;
  for (const auto& [generation, by_rank] : generations_) {
    for (const auto& [rank, memory] : by_rank) found.push_back(memory);
  }
  return found;
}

std::optional<KeptMemories::Common> KeptMemories::newest_common(
    const std::set<std::uint64_t>& preferred) const {
  std::optional<Common> newest;
  bool is_preferred = false;
  for (const auto& [generation, by_rank] : generations_) {
    for (auto& [sequence, common] : common_of(by_rank)) {
      const bool is_one = preferred.count(sequence) > 0;
      const bool is_newer =
          !newest || std::pair(is_preferred, newest->saved.sequence) < std::pair(is_one, sequence);
      if (!is_newer) continue;
      newest = common;
      is_preferred = is_one;
    }
  }
  return newest;
}

std::map<std::uint64_t, KeptMemories::Common> KeptMemories::common_of(const ByRank& memories) {
  std::map<std::uint64_t, Common> by_sequence;
  for (const auto& [rank, memory] : memories) {
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      const auto saved = memory->slot(i).whole();
      if (!saved) continue;
      Common& common = by_sequence[saved->sequence];
      common.saved = *saved;
      common.slots.emplace_back(memory, i);
    }
  }
  std::erase_if(by_sequence,
                [&](const auto& entry) { return entry.second.slots.size() != memories.size(); });
  return by_sequence;
}

}  // namespace libddp
