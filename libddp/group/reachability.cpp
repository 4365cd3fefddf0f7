#include "libddp/group/reachability.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>

#include "libddp/base/backoff.h"
#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"

namespace libddp {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// Waits for a connection in progress; 0 or its errno.
int finish_connecting(int socket, Deadline deadline) {
  while (true) {
    pollfd entry{socket, POLLOUT, 0};
    const auto piece =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline.remaining(kInterruptPeriod));
    if (::poll(&entry, 1, static_cast<int>(piece.count()) + 1) > 0) break;
    check_interrupt();
    if (deadline.expired()) return ETIMEDOUT;
  }
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

/// One try at one address: 0 or an errno.
int try_address(const addrinfo& address, Deadline deadline) {
  const UniqueFd socket(::socket(
      address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
  if (!socket) return errno;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  return finish_connecting(socket.get(), deadline);
}

/// Empty if somebody listens, else what is wrong.
std::string try_host(const std::string& host, std::uint16_t port, Deadline deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return fmt::format("cannot resolve the name: {}", ::gai_strerror(error));
  const AddressList list(found, &::freeaddrinfo);
  std::string problem = "it has no address";
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    const int failed = try_address(*address, deadline);
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
