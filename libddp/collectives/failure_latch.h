#pragma once

// The first failure of a communicator, kept for ever.
//
// Thread rule: any thread. `is_set` is one load, for hot paths.
//
//   if (latch.set(std::move(failure))) tell_the_peers();
//   if (latch.is_set()) throw_failure(*latch.get(), latch.get()->message);

#include <atomic>
#include <mutex>
#include <optional>

#include "libddp/base/group_failure.h"

namespace libddp {

class FailureLatch {
 public:
  /// Keeps `failure` if it is the first; says whether it was.
  bool set(GroupFailure failure) noexcept;
  bool is_set() const noexcept { return is_set_.load(std::memory_order_acquire); }
  /// Null while there is none; valid and unchanging afterwards.
  const GroupFailure* get() const noexcept { return is_set() ? &*failure_ : nullptr; }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_set_{false};
  std::optional<GroupFailure> failure_;
};

}  // namespace libddp
