#pragma once

// What ranks tell each other of the slots in their memories, to find the newest save that all have.
// Thread rule: functions of their arguments.
//
//   std::vector<ToldSlot> all = told_slots_of(ranks.gather(tell_slots(memory->fetch())));

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "libddp/slots/slot_memory.h"
#include "libddp/transport/host_layout.h"

namespace libddp {

/// A slot in one rank's memory, or in a copy of it.
struct ToldSlot {
  /// 0: nothing is known to be in it.
  std::uint64_t sequence = 0;
  std::int64_t step = 0;
  std::uint64_t start = 0;
  std::uint64_t generation = 0;
  int world_size = 0;
  int rank = 0;
  /// Which one of the memory's.
  int slot = 0;
  /// Why it is not whole although it was; empty for one that is, or that nobody has finished.
  std::string damage;
  /// On its host it is.
  int teller = 0;

  bool is_whole() const { return sequence != 0 && damage.empty(); }
  SavedStep saved() const { return {.step = step, .sequence = sequence, .start = start}; }
};

/// A line for each slot, also for one that is not whole: the next save is newer in any case, and
/// what is damaged is named.
std::string tell_slots(const std::vector<std::shared_ptr<SlotMemory>>& memories);

/// What the ranks have told, by rank.
std::vector<ToldSlot> told_slots_of(const std::vector<std::string>& texts);

/// A line in the log: there are saves in memory, and none that all ranks have. `members` have the
/// newest one.
void warn_of_lost_ranks(const ToldSlot& newest, const std::set<int>& members);

/// A line in the log for each slot that is damaged: whose it is and on which host, of which step,
/// what is wrong with it, and which save is the newest that all ranks have (`newest`; null: none in
/// memory). Once for a slot, however many ranks tell of it.
void warn_of_damage(const std::vector<ToldSlot>& told, const HostLayout& hosts,
                    const SavedStep* newest);

}  // namespace libddp
