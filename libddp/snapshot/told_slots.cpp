#include "libddp/snapshot/told_slots.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

#include "libddp/base/log.h"

namespace libddp {

std::string tell_slots(const std::vector<std::shared_ptr<SlotMemory>>& memories) {
  std::string text;
  for (const auto& memory : memories) {
    const SlotIdentity& identity = memory->identity();
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      const auto saved = memory->slot(i).whole();
      text += fmt::format("{} {} {} {} {}\n", saved ? saved->sequence : 0, saved ? saved->step : 0,
                          identity.generation, identity.world_size, identity.rank);
    }
  }
  return text;
}

std::vector<ToldSlot> told_slots_of(const std::vector<std::string>& texts) {
  std::vector<ToldSlot> all;
  for (std::size_t teller = 0; teller < texts.size(); ++teller) {
    std::istringstream lines(texts[teller]);
    ToldSlot told;
    told.teller = static_cast<int>(teller);
    while (lines >> told.sequence >> told.step >> told.generation >> told.world_size >> told.rank) {
      all.push_back(told);
    }
  }
  return all;
}

void warn_of_lost_ranks(const ToldSlot& newest, const std::set<int>& members) {
  std::vector<int> lost;
  for (int rank = 0; rank < newest.world_size; ++rank) {
    if (members.count(rank) == 0) lost.push_back(rank);
  }
  log(LogLevel::Warn, "snapshot_not_whole_in_memory",
      {{"step", std::to_string(newest.step)},
       {"ranks", std::to_string(newest.world_size)},
       {"lost_ranks", fmt::format("{}", fmt::join(lost, ","))},
       {"reason", "no living host has what these ranks saved, nor a copy"}});
}

}  // namespace libddp
