#pragma once

// Pauses between looks at something that nobody announces: short at first, for ranks that start
// together, each by half longer than the one before, up to a limit. So a wait lasts at most about
// half longer than it must. Thread rule: used by one thread.
//
//   Backoff backoff(std::chrono::milliseconds(50));
//   while (!has_come()) {
//     if (deadline.expired()) throw TimeoutError(...);
//     backoff.pause(deadline);
//   }

#include <chrono>

#include "libddp/base/deadline.h"

namespace libddp {

class Backoff {
 public:
  explicit Backoff(std::chrono::nanoseconds longest) : longest_(longest) {}

  /// Sleeps, not beyond the deadline. Interrupts are the caller's to look at.
  void pause(Deadline deadline = Deadline::never());

  /// What the next pause will last.
  std::chrono::nanoseconds next() const { return next_; }

 private:
  std::chrono::nanoseconds next_ = std::chrono::microseconds(500);
  std::chrono::nanoseconds longest_;
};

}  // namespace libddp
