#include "libddp/keeper/kept_memories.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace libddp {
namespace {

/// So many are remembered: more than memories have slots for.
constexpr std::size_t kCompleteSaves = 8;

}  // namespace

void KeptMemories::put(SlotMemory memory) {
  auto& by_rank = generations_[memory.identity().generation];
  const int rank = memory.identity().rank;
  by_rank[rank] = std::make_shared<SlotMemory>(std::move(memory));
  forget_old();
}

void KeptMemories::note_complete(std::uint64_t sequence) {
  // A job that has gone back to an older save counts from there again; its ranks are never more
  // than one save apart.
  complete_.erase(complete_.upper_bound(sequence + 1), complete_.end());
  complete_.insert(sequence);
  while (complete_.size() > kCompleteSaves) complete_.erase(complete_.begin());
}

void KeptMemories::forget_old() {
  auto newest_whole = generations_.end();
  auto newest_complete = generations_.end();
  for (auto each = generations_.begin(); each != generations_.end(); ++each) {
    const auto common = common_of(each->second);
    if (!common.empty()) newest_whole = each;
    const bool is_complete = std::any_of(common.begin(), common.end(), [&](const auto& entry) {
      return complete_.count(entry.first) > 0;
    });
    if (is_complete) newest_complete = each;
  }
  // One that this host has whole and others may not replaces none that all of them have.
  const auto kept = newest_complete == generations_.end() ? newest_whole : newest_complete;
  for (auto each = generations_.begin(); each != generations_.end();) {
    const bool is_older = kept != generations_.end() && each->first < kept->first;
    // Begun and never finished, by starts that died: only the newest of them may still be.
    const bool is_left =
        each != kept && each != newest_whole && std::next(each) != generations_.end();
    each = is_older || is_left ? generations_.erase(each) : std::next(each);
  }
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

std::optional<KeptMemories::Common> KeptMemories::newest_common() const {
  std::optional<Common> newest;
  bool is_complete = false;
  for (const auto& [generation, by_rank] : generations_) {
    for (auto& [sequence, common] : common_of(by_rank)) {
      const bool is_one = complete_.count(sequence) > 0;
      const bool is_newer =
          !newest || std::pair(is_complete, newest->saved.sequence) < std::pair(is_one, sequence);
      if (!is_newer) continue;
      newest = common;
      is_complete = is_one;
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
