#include "libddp/collectives/failure_latch.h"

#include <utility>

namespace libddp {

bool FailureLatch::set(GroupFailure failure) noexcept {
  std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_.emplace(std::move(failure));
  is_set_.store(true, std::memory_order_release);
  return true;
}

}  // namespace libddp
