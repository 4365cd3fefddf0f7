#include "libddp/snapshot/told_slots.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>
#include <tuple>

#include "libddp/base/log.h"

namespace libddp {

std::string tell_slots(const std::vector<std::shared_ptr<SlotMemory>>& memories) {
  std::string text;
  for (const auto& memory : memories) {
    const SlotIdentity& identity = memory->identity();
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      const Slot& slot = memory->slot(i);
      auto saved = slot.whole();
      const auto damage = saved ? std::nullopt : slot.damage();
      if (damage) saved = damage->saved;
      text += fmt::format("{} {} {} {} {} {} {} {}\n", saved ? saved->sequence : 0,
                          saved ? saved->step : 0, saved ? saved->start : 0, identity.generation,
                          identity.world_size, identity.rank, i, damage ? damage->reason : "");
    }
  }
  return text;
}

std::vector<ToldSlot> told_slots_of(const std::vector<std::string>& texts) {
  std::vector<ToldSlot> all;
  for (std::size_t teller = 0; teller < texts.size(); ++teller) {
    std::istringstream lines(texts[teller]);
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      ToldSlot told;
      told.teller = static_cast<int>(teller);
      words >> told.sequence >> told.step >> told.start >> told.generation >> told.world_size >>
          told.rank >> told.slot;
      words.get();
      std::getline(words, told.damage);
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

void warn_of_damage(const std::vector<ToldSlot>& told, const HostLayout& hosts,
                    const SavedStep* newest) {
  // All ranks of a host tell of the same memories.
  std::set<std::tuple<int, std::uint64_t, int, int>> known;
  for (const ToldSlot& each : told) {
    if (each.damage.empty()) continue;
    const int host = hosts.host(each.teller);
    if (!known.insert({host, each.generation, each.rank, each.slot}).second) continue;
    // Where the job has other ranks now, nobody knows on which host that one was.
    const bool is_copy =
        each.world_size == static_cast<int>(hosts.host_of.size()) && hosts.host(each.rank) != host;
    log(LogLevel::Warn, "snapshot_damaged_in_memory",
        {{"whose", fmt::format("{}rank {} of {}", is_copy ? "the copy of " : "", each.rank,
                               each.world_size)},
         {"host_of_rank", each.teller},
         {"step", each.sequence == 0 ? "unknown" : std::to_string(each.step)},
         {"reason", each.damage},
         {"newest_whole", newest ? std::to_string(newest->step) : "none in memory"}});
  }
}

}  // namespace libddp
