#pragma once

// A point on the steady clock by which a wait must end. Thread rule: immutable value.
//
//   Deadline deadline = Deadline::after(std::chrono::seconds(30));
//   while (!ready()) {
//     if (deadline.expired()) throw TimeoutError(...);
//   }

#include <chrono>
#include <optional>

namespace libddp {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// A wait without an end (only for services that live as long as the process).
  static Deadline never() { return Deadline(std::nullopt); }
  /// `timeout` from now; one past the clock's range (about 290 years) is never.
  static Deadline after(std::chrono::milliseconds timeout);

  bool expired() const { return end_ && Clock::now() >= *end_; }
  bool is_never() const { return !end_; }
  /// Time left, never negative; `limit` where the deadline is later or there is none.
  std::chrono::nanoseconds remaining(std::chrono::nanoseconds limit) const;

 private:
  explicit Deadline(std::optional<Clock::time_point> end) : end_(end) {}

  std::optional<Clock::time_point> end_;
};

}  // namespace libddp
