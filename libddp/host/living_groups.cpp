#include "libddp/host/living_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

struct Living {
  const void* store = nullptr;
  std::vector<int> global_ranks;
  LivingGroup::Loss loss;
};

struct LivingGroups {
  std::mutex mutex;
  std::uint64_t last_number = 0;
  std::map<std::uint64_t, Living> groups;
};

LivingGroups& living_groups() {
  static LivingGroups* const groups =
      new LivingGroups;  // groups may be destroyed after static objects
  return *groups;
}

std::string in_other_group(const std::string& where, const Error& error) {
  return fmt::format("{}: a group over the same store failed meanwhile: {}", where, error.what());
}

}  // namespace

void LivingGroup::join(const void* store, std::vector<int> global_ranks, Loss loss) {
  LivingGroups& groups = living_groups();
  const std::lock_guard lock(groups.mutex);
  number_ = ++groups.last_number;
  groups.groups.insert_or_assign(number_, Living{store, std::move(global_ranks), std::move(loss)});
}

void LivingGroup::leave() {
  if (number_ == 0) return;
  LivingGroups& groups = living_groups();
  const std::lock_guard lock(groups.mutex);
  groups.groups.erase(std::exchange(number_, 0));
}

LossWatch::LossWatch(const void* store, std::vector<int> global_ranks)
    : global_ranks_(std::move(global_ranks)) {
  LivingGroups& groups = living_groups();
  const std::lock_guard lock(groups.mutex);
  for (const auto& [number, entry] : groups.groups) {
    // Whoever makes a group after a loss knows about that one.
    if (entry.store == store && !entry.loss()) numbers_.push_back(number);
  }
}

void LossWatch::throw_if_lost(const std::string& where) const {
  LivingGroups& groups = living_groups();
  // Under the lock: the group does not end meanwhile.
  const std::lock_guard lock(groups.mutex);
  for (const std::uint64_t number : numbers_) {
    const auto found = groups.groups.find(number);
    if (found == groups.groups.end()) continue;
    const Living& group = found->second;
    try {
      if (const auto loss = group.loss()) std::rethrow_exception(loss);
    } catch (const PeerError& error) {
      // Its rank is one of the other group.
      const bool is_needed = error.peer_rank() < 0 || needs(group.global_ranks, error.peer_rank());
      if (is_needed) throw PeerError(in_other_group(where, error), -1, error.peer_pid());
    } catch (const NetworkError& error) {
      throw NetworkError(in_other_group(where, error));
    }
  }
}

bool LossWatch::needs(const std::vector<int>& group, int rank) const {
  const auto place = static_cast<std::size_t>(rank);
  return place >= group.size() ||
         std::find(global_ranks_.begin(), global_ranks_.end(), group[place]) != global_ranks_.end();
}

}  // namespace libddp
