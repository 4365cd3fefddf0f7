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

namespace libddp {

/// A slot that is whole, in one rank's memory.
struct ToldSlot {
  std::uint64_t sequence = 0;
  std::int64_t step = 0;
  std::uint64_t generation = 0;
  int world_size = 0;
  int rank = 0;
  /// On its host it is.
  int teller = 0;
};

/// A line for each slot, also for one that is not whole: the next save is newer in any case.
std::string tell_slots(const std::vector<std::shared_ptr<SlotMemory>>& memories);

/// What the ranks have told, by rank.
std::vector<ToldSlot> told_slots_of(const std::vector<std::string>& texts);

/// A line in the log: there are saves in memory, and none that all ranks have. `members` have the
/// newest one.
void warn_of_lost_ranks(const ToldSlot& newest, const std::set<int>& members);

}  // namespace libddp
