#include "libddp/transport/wait_for_events.h"

#include <cerrno>
#include <chrono>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

bool wait_in_pieces(pollfd* entries, std::size_t count, Deadline deadline) {
  while (true) {
    const auto piece =
        std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(kInterruptPeriod));
    const int ready = ::poll(entries, static_cast<nfds_t>(count), static_cast<int>(piece.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw NetworkError(errno_text("poll", errno));
    if (deadline.expired()) return false;
    check_interrupt();
  }
}

}  // namespace

bool wait_for_events(int fd, short events, Deadline deadline) {
  pollfd entry{fd, events, 0};
  return wait_in_pieces(&entry, 1, deadline);
}

bool wait_for_events(std::vector<pollfd>& entries, Deadline deadline) {
  return wait_in_pieces(entries.data(), entries.size(), deadline);
}

}  // namespace libddp
