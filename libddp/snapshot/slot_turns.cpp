#include "libddp/snapshot/slot_turns.h"

#include <algorithm>

#include "libddp/slots/slot_memory.h"

namespace libddp {

void SlotTurns::restart(std::optional<int> newest) {
  used_.clear();
  if (newest) used_.push_back(*newest);
  forget_copies();
}

std::optional<int> SlotTurns::newest() const {
  return used_.empty() ? std::nullopt : std::optional(used_.back());
}

std::vector<int> SlotTurns::candidates(bool may_use_spare) const {
  std::vector<int> found;
  for (int slot = 0; slot < SlotMemory::kSpare; ++slot) {
    if (!is_used(slot)) found.push_back(slot);
  }
  for (const int slot : used_) {
    if (!is_kept(slot) && slot != newest()) found.push_back(slot);
  }
  if (may_use_spare && !is_used(SlotMemory::kSpare)) found.push_back(SlotMemory::kSpare);
  if (newest() && !is_kept(*newest())) found.push_back(*newest());
  // The one on its way is what comes next: without it nothing ever arrives.
  if (copied_ && copied_ != copying_) found.push_back(*copied_);
  if (copying_) found.push_back(*copying_);
  return found;
}

bool SlotTurns::needs_spare() const {
  const int best = candidates(false).front();
  return !is_used(SlotMemory::kSpare) && (is_kept(best) || best == newest());
}

void SlotTurns::take(int slot) {
  std::erase(used_, slot);
  if (copying_ == slot) copying_.reset();
  if (copied_ == slot) copied_.reset();
}

void SlotTurns::fill(int slot) {
  take(slot);
  used_.push_back(slot);
}

bool SlotTurns::begin_copy() {
  if (copying_ || !newest() || newest() == copied_) return false;
  copying_ = newest();
  return true;
}

void SlotTurns::end_copy(bool is_everywhere) {
  if (is_everywhere || !copied_ || has_failed_) copied_ = copying_;
  has_failed_ = !is_everywhere;
  copying_.reset();
}

void SlotTurns::forget_copies() {
  copying_.reset();
  copied_.reset();
  has_failed_ = false;
}

bool SlotTurns::is_used(int slot) const {
  return std::find(used_.begin(), used_.end(), slot) != used_.end();
}

}  // namespace libddp
