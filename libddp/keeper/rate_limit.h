#pragma once

// How many bytes may go now, so that no second has more than a rate. Thread rule: one thread.
//
//   RateLimit limit(100'000'000);              // bytes per second; 0 = no limit
//   limit.spend(send_some(socket, std::min(limit.allowed(), size)));

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace libddp {

class RateLimit {
 public:
  explicit RateLimit(std::uint64_t bytes_per_second) : rate_(bytes_per_second) {}

  /// A tenth of a second's bytes at most, so that a pause is not caught up with at once.
  std::size_t allowed() {
    if (rate_ == 0) return std::numeric_limits<std::size_t>::max();
    const auto now = Clock::now();
    const double passed = std::chrono::duration<double>(now - since_).count();
    since_ = now;
    const double rate = static_cast<double>(rate_);
    saved_up_ = std::min(saved_up_ + rate * passed, std::max(1.0, rate / 10));
    return saved_up_ < 1 ? 0 : static_cast<std::size_t>(saved_up_);
  }
  void spend(std::size_t bytes) { saved_up_ -= static_cast<double>(bytes); }
  /// How long to wait where nothing is allowed.
  std::chrono::milliseconds pause() const {
    if (rate_ == 0) return std::chrono::milliseconds(0);
    return std::chrono::milliseconds(1 + std::min<std::uint64_t>(1000 / rate_, 1000));
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::uint64_t rate_;
  Clock::time_point since_ = Clock::now();
  double saved_up_ = 0;
};

}  // namespace libddp
