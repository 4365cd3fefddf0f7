#include "libddp/base/deadline.h"

#include <algorithm>

namespace libddp {

Deadline Deadline::after(std::chrono::milliseconds timeout) {
  const Clock::time_point now = Clock::now();
  // milliseconds::max() is a common "no limit": adding it to the clock would overflow.
  const auto room =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
  if (timeout >= room) return never();
  return Deadline(now + std::max(timeout, std::chrono::milliseconds::zero()));
}

std::chrono::nanoseconds Deadline::remaining(std::chrono::nanoseconds limit) const {
  if (!end_) return limit;
  const std::chrono::nanoseconds left = *end_ - Clock::now();
  return std::clamp(left, std::chrono::nanoseconds::zero(), limit);
}

}  // namespace libddp
