#include "libddp/transport/tcp_socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "libddp/base/error.h"
#include "libddp/base/parent_only.h"
#include "libddp/base/system_error.h"
#include "libddp/transport/wait_for_events.h"

namespace libddp {
namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketAddress socket_address(const TcpEndpoint& endpoint) {
  SocketAddress result;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&result.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&result.storage);
  if (::inet_pton(AF_INET, endpoint.address.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(endpoint.port);
    result.length = sizeof(sockaddr_in);
  } else if (::inet_pton(AF_INET6, endpoint.address.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(endpoint.port);
    result.length = sizeof(sockaddr_in6);
  } else {
    throw NetworkError(fmt::format("'{}' is no numeric address", endpoint.address));
  }
  return result;
}

void set_number(int socket, int level, int option, int value, const char* what) {
  if (::setsockopt(socket, level, option, &value, sizeof(value)) == 0) return;
  throw NetworkError(errno_text(what, errno));
}

UniqueFd make_tcp_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw NetworkError(errno_text("socket", errno));
  close_in_children(fd.get());
  return fd;
}

void no_delay(int socket) { set_number(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"); }

void wait_or_throw(int socket, short events, Deadline deadline) {
  if (!wait_for_events(socket, events, deadline)) throw TimeoutError("no answer in time");
}

}  // namespace

std::string TcpEndpoint::to_string() const {
  const bool is_v6 = address.find(':') != std::string::npos;
  return is_v6 ? fmt::format("[{}]:{}", address, port) : fmt::format("{}:{}", address, port);
}

TcpListener TcpListener::open(const std::string& address) {
  TcpListener listener;
  listener.endpoint_ = {address, 0};
  const SocketAddress name = socket_address(listener.endpoint_);
  listener.fd_ = make_tcp_socket(name.storage.ss_family);
  if (::bind(listener.fd(), name.get(), name.length) != 0) {
    throw NetworkError(errno_text("bind", errno));
  }
  if (::listen(listener.fd(), SOMAXCONN) != 0) throw NetworkError(errno_text("listen", errno));
  SocketAddress bound;
  bound.length = sizeof(bound.storage);
  if (::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length)) {
    throw NetworkError(errno_text("getsockname", errno));
  }
  // The port stands in one place in both families.
  listener.endpoint_.port = ntohs(reinterpret_cast<sockaddr_in*>(&bound.storage)->sin_port);
  return listener;
}

UniqueFd TcpListener::accept() {
  UniqueFd connection(::accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  is_out_of_descriptors_ = false;
  if (connection) {
    close_in_children(connection.get());
    // Fails only for a connection that is over already.
    const int on = 1;
    ::setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return connection;
  }
  // accept(2) hands over errors of the new connection, which are no errors of the listener. A
  // crowd that takes all descriptors passes by; what waits in the queue stays there.
  switch (errno) {
    case EBADF:
    case EINVAL:
      throw NetworkError(errno_text("accept", errno));
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      is_out_of_descriptors_ = true;
      return UniqueFd();
    default:
      return UniqueFd();
  }
}

UniqueFd connect_tcp(const TcpEndpoint& endpoint, Deadline deadline) {
  const SocketAddress address = socket_address(endpoint);
  UniqueFd fd = make_tcp_socket(address.storage.ss_family);
  no_delay(fd.get());
  if (::connect(fd.get(), address.get(), address.length) == 0) return fd;
  if (errno != EINPROGRESS && errno != EINTR) throw NetworkError(errno_text("connect", errno));
  wait_or_throw(fd.get(), POLLOUT, deadline);
  int error = 0;
  socklen_t length = sizeof(error);
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) throw NetworkError(errno_text("connect", error));
  return fd;
}

void watch_liveness(int socket) {
  set_number(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_number(socket, IPPROTO_TCP, TCP_KEEPIDLE, 2, "TCP_KEEPIDLE");
  set_number(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1, "TCP_KEEPINTVL");
  set_number(socket, IPPROTO_TCP, TCP_KEEPCNT, 5, "TCP_KEEPCNT");
  set_number(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 7000, "TCP_USER_TIMEOUT");
}

void keep_alive(int socket) {
  set_number(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_number(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5, "TCP_KEEPIDLE");
  set_number(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1, "TCP_KEEPINTVL");
  set_number(socket, IPPROTO_TCP, TCP_KEEPCNT, 5, "TCP_KEEPCNT");
}

void send_bytes(int socket, const void* data, std::size_t bytes, Deadline deadline) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      at += sent;
      bytes -= static_cast<std::size_t>(sent);
      continue;
    }
    const int error = errno;
    if (error == EAGAIN) wait_or_throw(socket, POLLOUT, deadline);
    if (error != EAGAIN && error != EINTR) throw NetworkError(errno_text("send", error));
  }
}

void receive_bytes(int socket, void* data, std::size_t bytes, Deadline deadline) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket, at, bytes, MSG_DONTWAIT);
    if (got == 0) throw NetworkError("the connection was closed");
    if (got > 0) {
      at += got;
      bytes -= static_cast<std::size_t>(got);
      continue;
    }
    const int error = errno;
    if (error == EAGAIN) wait_or_throw(socket, POLLIN, deadline);
    if (error != EAGAIN && error != EINTR) throw NetworkError(errno_text("recv", error));
  }
}

}  // namespace libddp
