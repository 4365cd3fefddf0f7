#include "libddp/collectives/wait_ledger.h"

#include <algorithm>

namespace libddp {

WaitLedger::WaitLedger(int num_ranks)
    : total_ns_(static_cast<std::size_t>(std::max(num_ranks, 0))) {}

// What another host has said is a number like any other: out of range it counts for nobody.
void WaitLedger::charge(Delay delay) {
  if (delay.ns <= 0 || delay.rank < 0) return;
  const auto index = static_cast<std::size_t>(delay.rank);
  if (index >= total_ns_.size()) return;
  total_ns_[index].fetch_add(delay.ns, std::memory_order_relaxed);
  if (delay.ns > longest_.ns) longest_ = delay;
}

void WaitLedger::add(int holder, std::int64_t ns, Delay told) {
  told.ns = told.rank < 0 ? 0 : std::clamp<std::int64_t>(told.ns, 0, std::max<std::int64_t>(ns, 0));
  charge(told);
  charge({holder, ns - told.ns});
}

std::int64_t WaitLedger::total_ns(int rank) const {
  return total_ns_.at(static_cast<std::size_t>(rank)).load(std::memory_order_relaxed);
}

}  // namespace libddp
