#include "libddp/rendezvous/reachability.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <cerrno>

#include "libddp/base/backoff.h"
#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"
#include "libddp/transport/host_lookup.h"
#include "libddp/transport/wait_for_events.h"

namespace libddp {
namespace {

/// One try at one address: 0 or an errno.
int try_address(const HostAddress& address, Deadline deadline) {
  const UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return errno;
  if (::connect(socket.get(), address.get(), address.length) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  if (!wait_for_events(socket.get(), POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

/// Empty if somebody listens, else what is wrong.
std::string try_host(const std::string& host, std::uint16_t port, Deadline deadline) {
  const HostLookup found = look_up_host(host, port, deadline);
  std::string problem = found.problem;
  for (const HostAddress& address : found.addresses) {
    const int failed = try_address(address, deadline);
    if (failed == 0) return "";
    problem = errno_text("connect", failed);
  }
  return problem;
}

}  // namespace

void wait_until_reachable(const std::string& host, std::uint16_t port, int rank,
                          std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  Backoff backoff(kInterruptPeriod);
  InterruptPoll interrupt;
  while (true) {
    const std::string problem = try_host(host, port, deadline);
    if (problem.empty()) return;
    if (deadline.expired()) {
      throw TimeoutError(fmt::format(
          "libddp: rank {} could not reach the store at {}:{} within {:.1f} s ({}). Hint: rank 0 "
          "(or the launcher) must run at MASTER_ADDR and listen on MASTER_PORT, equal on all "
          "ranks, with no firewall between.",
          rank, host, port, std::chrono::duration<double>(timeout).count(), problem));
    }
    backoff.pause(deadline);
    interrupt.poll();
  }
}

}  // namespace libddp
