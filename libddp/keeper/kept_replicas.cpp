#include "libddp/keeper/kept_replicas.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace libddp {

void KeptReplicas::put(Replica replica) {
  const std::lock_guard lock(mutex_);
  const SlotIdentity& identity = replica.memory->identity();
  generations_[identity.generation].insert_or_assign(identity.rank, std::move(replica));
  forget_old();
}

KeptReplicas::Replica KeptReplicas::find(int rank, std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  const auto by_rank = generations_.find(generation);
  if (by_rank == generations_.end()) return {};
  const auto found = by_rank->second.find(rank);
  return found == by_rank->second.end() ? Replica{} : found->second;
}

void KeptReplicas::drop(int rank, std::uint64_t generation) {
  const std::lock_guard lock(mutex_);
  const auto by_rank = generations_.find(generation);
  if (by_rank == generations_.end()) return;
  by_rank->second.erase(rank);
  if (by_rank->second.empty()) generations_.erase(by_rank);
}

void KeptReplicas::forget_before(std::uint64_t generation) {
  const std::lock_guard lock(mutex_);
  generations_.erase(generations_.begin(), generations_.lower_bound(generation));
}

std::vector<KeptReplicas::Memory> KeptReplicas::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Memory> found;
  for (const auto& [generation, by_rank] : generations_) {
    for (const auto& [rank, replica] : by_rank) found.push_back(replica.memory);
  }
  return found;
}

bool KeptReplicas::is_empty() const {
  const std::lock_guard lock(mutex_);
  return generations_.empty();
}

void KeptReplicas::forget_old() {
  while (generations_.size() > 1) {
    const ByRank& older = generations_.begin()->second;
    const ByRank& newer = std::next(generations_.begin())->second;
    if (generations_.size() < 3 && !has_all_of(newer, older)) return;
    generations_.erase(generations_.begin());
  }
}

bool KeptReplicas::has_all_of(const ByRank& newer, const ByRank& older) {
  const int world_size = newer.begin()->second.memory->identity().world_size;
  return std::all_of(older.begin(), older.end(), [&](const auto& entry) {
    return entry.first >= world_size || newer.count(entry.first) > 0;
  });
}

}  // namespace libddp
