#pragma once

// Nanoseconds on the monotonic clock: one and the same for all processes of a machine, equal to
// Python's time.monotonic_ns(). Thread rule: any thread.
//
//   const std::int64_t begin_ns = monotonic_ns();

#include <chrono>
#include <cstdint>

namespace libddp {

inline std::int64_t monotonic_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace libddp
