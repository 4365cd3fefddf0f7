#include "libddp/transport/unix_socket.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/parent_only.h"
#include "libddp/base/printable.h"
#include "libddp/base/random.h"
#include "libddp/base/system_error.h"
#include "libddp/transport/wait_for_events.h"

namespace libddp {
namespace {

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
};

// A leading zero byte makes the name abstract; its length is then part of it.
Address abstract_address(const std::string& name) {
  Address address;
  if (name.empty() || name.size() + 1 > sizeof(address.name.sun_path)) {
    throw NetworkError(fmt::format("'{}' is no name of a Unix socket", printable(name)));
  }
  address.name.sun_family = AF_UNIX;
  std::memcpy(address.name.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

UniqueFd make_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw NetworkError(errno_text("socket", errno));
  close_in_children(fd.get());
  return fd;
}

}  // namespace

UnixListener UnixListener::open() {
  return open_as(fmt::format("libddp-{}-{}", ::getpid(), random_hex(8)));
}

UnixListener UnixListener::open_as(const std::string& own_name) {
  UnixListener listener;
  listener.fd_ = make_socket();
  listener.name_ = own_name;
  const Address address = abstract_address(listener.name_);
  const auto* name = reinterpret_cast<const sockaddr*>(&address.name);
  if (::bind(listener.fd(), name, address.length) != 0) {
    throw NetworkError(errno_text("bind", errno));
  }
  if (::listen(listener.fd(), SOMAXCONN) != 0) throw NetworkError(errno_text("listen", errno));
  return listener;
}

UniqueFd UnixListener::accept(std::chrono::milliseconds limit) {
  if (!wait_readable(fd(), limit)) return UniqueFd();
  UniqueFd connection(::accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  // A crowd that takes all descriptors passes by; what waits in the queue stays there.
  is_out_of_descriptors_ =
      !connection && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
  if (is_out_of_descriptors_) return connection;
  // The connection may be gone again by now, or a signal came: there will be another call.
  if (!connection && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    throw NetworkError(errno_text("accept", errno));
  }
  close_in_children(connection.get());
  return connection;
}

UniqueFd connect_unix(const std::string& name, Deadline deadline) {
  const Address address = abstract_address(name);
  UniqueFd fd = make_socket();
  for (;;) {
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.name), address.length) ==
        0) {
      return fd;
    }
    // EAGAIN: the listener's queue is full; there is no event to wait for.
    if (errno != EAGAIN && errno != EINTR) throw NetworkError(errno_text("connect", errno));
    if (deadline.expired()) throw TimeoutError("connect: the listener's queue stayed full");
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

PeerCredentials peer_credentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    throw NetworkError(errno_text("getsockopt(SO_PEERCRED)", errno));
  }
  return {credentials.pid, credentials.uid};
}

bool wait_readable(int socket, std::chrono::milliseconds limit) {
  return wait_for_events(socket, POLLIN, Deadline::after(limit));
}

bool is_closed(int socket) {
  char byte = 0;
  const ssize_t size = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (size == 0) return true;
  return size < 0 && errno != EAGAIN && errno != EINTR;
}

}  // namespace libddp
