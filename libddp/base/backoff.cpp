#include "libddp/base/backoff.h"

#include <algorithm>
#include <thread>

namespace libddp {

void Backoff::pause(Deadline deadline) {
  std::this_thread::sleep_for(deadline.remaining(next_));
  next_ = std::min(next_ + next_ / 2, longest_);
}

}  // namespace libddp
