#pragma once

// Sleeping until someone notifies, through a FutexEvent in shared memory.
//
// The sleeper registers, looks once more, then sleeps; who changes what the sleeper waits for looks
// at `sleepers` afterwards. With sequentially consistent accesses on both sides no notification is
// lost. Thread rule: any thread, any process that maps the event.
//
//   Sleeper sleeper(event);
//   if (!ready()) sleeper.sleep(100ms);      // elsewhere: make_ready(); notify(event);

#include <chrono>

#include "libddp/collectives/shm_page.h"
#include "libddp/transport/wakeup.h"

namespace libddp {

/// Wakes all sleepers, whether or not any are registered.
inline void notify_always(FutexEvent& event) {
  event.notifications.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(event.notifications);
}

/// Costs one load where nobody sleeps.
inline void notify(FutexEvent& event) {
  if (event.sleepers.load(std::memory_order_seq_cst) != 0) notify_always(event);
}

/// Counts even if nobody sleeps, so that who has read `notifications` before can tell that it was
/// notified.
inline void notify_counted(FutexEvent& event) {
  event.notifications.fetch_add(1, std::memory_order_seq_cst);
  if (event.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(event.notifications);
}

class Sleeper {
 public:
  explicit Sleeper(FutexEvent& event) : event_(event) {
    event_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    notifications_ = event_.notifications.load(std::memory_order_seq_cst);
  }
  /// For a caller that has read `notifications` earlier and looked since.
  Sleeper(FutexEvent& event, std::uint32_t notifications)
      : event_(event), notifications_(notifications) {
    event_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { event_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  /// Returns at once if the event has been notified since `notifications` was read.
  void sleep(std::chrono::nanoseconds limit) {
    futex_wait(event_.notifications, notifications_, limit);
  }

 private:
  FutexEvent& event_;
  std::uint32_t notifications_;
};

}  // namespace libddp
