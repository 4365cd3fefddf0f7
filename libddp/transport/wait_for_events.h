#pragma once

// The library's one way to wait for a descriptor: in pieces that let interrupts through, survive
// signals and end at a deadline. Thread rule: free function; any thread.
//
//   if (!wait_for_events(socket, POLLIN, deadline)) throw TimeoutError("no answer in time");

#include <poll.h>

#include <vector>

#include "libddp/base/deadline.h"

namespace libddp {

/// True once one of `events`, or the end of the connection, is there; false if the deadline passes
/// first. Throws NetworkError if the descriptor cannot be waited for.
bool wait_for_events(int fd, short events, Deadline deadline);

/// The same for many; `revents` say which.
bool wait_for_events(std::vector<pollfd>& entries, Deadline deadline);

}  // namespace libddp
