#include "libddp/keeper/replica_stream.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/transport/wait_for_events.h"

namespace libddp {

bool wait_unless_stopped(int socket, short events, int stop_fd,
                         std::chrono::milliseconds patience) {
  std::vector<pollfd> entries{{stop_fd, POLLIN, 0}, {socket, events, 0}};
  const bool has_come = wait_for_events(entries, Deadline::after(patience));
  if ((entries[0].revents & POLLIN) != 0) throw StateError("the keeper ends");
  return has_come;
}

ReplicaStream::ReplicaStream(UniqueFd socket, int stop_fd, std::chrono::milliseconds patience)
    : socket_(std::move(socket)), stop_fd_(stop_fd), patience_(patience) {}

void ReplicaStream::send(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket_.get(), at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      at += sent;
      bytes -= static_cast<std::size_t>(sent);
      continue;
    }
    const int error = errno;
    if (error == EAGAIN) wait(POLLOUT, "took");
    if (error != EAGAIN && error != EINTR) throw NetworkError(errno_text("send", error));
  }
}

void ReplicaStream::receive(void* data, std::size_t bytes) {
  std::span<std::byte> space(static_cast<std::byte*>(data), bytes);
  while (!space.empty()) space = space.subspan(receive_some(space));
}

std::size_t ReplicaStream::receive_some(std::span<std::byte> space) {
  while (true) {
    const ssize_t got = ::recv(socket_.get(), space.data(), space.size(), MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) throw NetworkError("it closed the connection");
    const int error = errno;
    if (error == EAGAIN) wait(POLLIN, "sent");
    if (error != EAGAIN && error != EINTR) throw NetworkError(errno_text("recv", error));
  }
}

void ReplicaStream::wait(short events, const char* what) {
  if (wait_unless_stopped(socket_.get(), events, stop_fd_, patience_)) return;
  throw TimeoutError(fmt::format("it {} nothing for {:g} s", what,
                                 std::chrono::duration<double>(patience_).count()));
}

}  // namespace libddp
