#pragma once

// Sleeping until someone rings, through a Bell in shared memory.
//
// The sleeper registers, looks once more, then sleeps; who changes what the sleeper waits for looks
// at `sleepers` afterwards. With sequentially consistent accesses on both sides no ring is lost.
// Thread rule: any thread, any process that maps the bell.
//
//   Sleeper sleeper(bell);
//   if (!ready()) sleeper.sleep(100ms);      // elsewhere: make_ready(); ring(bell);

#include <chrono>

#include "libddp/collectives/shm_page.h"
#include "libddp/transport/wakeup.h"

namespace libddp {

/// Wakes all sleepers, whether or not any are registered.
inline void ring_always(Bell& bell) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(bell.rings);
}

/// Costs one load where nobody sleeps.
inline void ring(Bell& bell) {
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring_always(bell);
}

/// Counts even if nobody sleeps, so that who has read `rings` before can tell that it rang.
inline void ring_counted(Bell& bell) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell.rings);
}

class Sleeper {
 public:
  explicit Sleeper(Bell& bell) : bell_(bell) {
    bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    rings_ = bell_.rings.load(std::memory_order_seq_cst);
  }
  /// For a caller that has read `rings` earlier and looked since.
  Sleeper(Bell& bell, std::uint32_t rings) : bell_(bell), rings_(rings) {
    bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  /// Returns at once if the bell has rung since `rings` was read.
  void sleep(std::chrono::nanoseconds limit) { futex_wait(bell_.rings, rings_, limit); }

 private:
  Bell& bell_;
  std::uint32_t rings_;
};

}  // namespace libddp
