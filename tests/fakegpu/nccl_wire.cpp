#include "tests/fakegpu/nccl_wire.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>

namespace mock_nccl {
namespace {

/// With the abstract namespace's leading zero.
socklen_t fill(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

int new_socket() {
  return checked(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "mock NCCL: socket");
}

}  // namespace

std::string new_socket_name() {
  static std::atomic<int> counter{0};
  std::random_device random;
  return "mock-nccl-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + "-" +
         std::to_string(random());
}

int listen_on(const std::string& name) {
  const int socket = new_socket();
  sockaddr_un address;
  const socklen_t length = fill(address, name);
  checked(::bind(socket, reinterpret_cast<sockaddr*>(&address), length), "mock NCCL: bind");
  checked(::listen(socket, SOMAXCONN), "mock NCCL: listen");
  return socket;
}

int connect_to(const std::string& name) {
  const int socket = new_socket();
  sockaddr_un address;
  const socklen_t length = fill(address, name);
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), length) < 0) {
    const int error = errno;
    ::close(socket);
    throw std::system_error(error, std::generic_category(), "mock NCCL: connect");
  }
  return socket;
}

bool send_all(int socket, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool recv_all(int socket, void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace mock_nccl
