#include "libddp/watchdog/pending_troubles.h"

#include <utility>

namespace libddp {

void PendingTroubles::add(int rank, Trouble trouble) {
  const std::lock_guard lock(mutex_);
  trouble.rank = rank;
  troubles_.insert_or_assign(rank, std::move(trouble));
}

void PendingTroubles::remove(int rank) {
  const std::lock_guard lock(mutex_);
  troubles_.erase(rank);
}

bool PendingTroubles::empty() const {
  const std::lock_guard lock(mutex_);
  return troubles_.empty();
}

std::uint64_t PendingTroubles::add_own(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  if (own_sequence_ != sequence) own_number_ = 0;
  own_sequence_ = sequence;
  return ++own_number_;
}

std::optional<PendingTroubles::Trouble> PendingTroubles::due(std::uint64_t running,
                                                             std::int64_t now_ns) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, trouble] : troubles_) {
    const bool is_waited_for = running > trouble.sequence;
    if (is_waited_for && !is_shared(trouble) && now_ns - trouble.seen_ns >= kGraceNs) {
      return trouble;
    }
  }
  return std::nullopt;
}

std::optional<PendingTroubles::Trouble> PendingTroubles::of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = troubles_.find(rank);
  if (found == troubles_.end()) return std::nullopt;
  return found->second;
}

}  // namespace libddp
