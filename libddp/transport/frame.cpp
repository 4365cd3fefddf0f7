#include "libddp/transport/frame.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/transport/wait_for_events.h"

namespace libddp {
namespace {

constexpr std::uint32_t kMagic = 0x7064646c;  // "lddp"
constexpr std::size_t kKernelDescriptors = 253;

struct Header {
  std::uint32_t magic = kMagic;
  std::uint32_t num_bytes = 0;
  std::uint32_t num_descriptors = 0;
};

union ControlBuffer {
  char bytes[CMSG_SPACE(kKernelDescriptors * sizeof(int))];
  cmsghdr aligned;
};

// One wait for `events`; throws when the deadline is over.
void wait_for(int socket, short events, Deadline deadline) {
  if (wait_for_events(socket, events, deadline)) return;
  throw TimeoutError("the peer neither sent nor took a message in time");
}

void attach(msghdr& message, ControlBuffer& control, const std::vector<int>& descriptors) {
  const std::size_t size = descriptors.size() * sizeof(int);
  std::memset(&control, 0, sizeof(control));
  message.msg_control = control.bytes;
  message.msg_controllen = CMSG_SPACE(size);
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(size);
  std::memcpy(CMSG_DATA(part), descriptors.data(), size);
}

void collect(msghdr& message, std::vector<UniqueFd>& descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
}

// Reads exactly `size` bytes and every descriptor that comes with them.
void receive_exactly(int socket, char* data, std::size_t size, std::vector<UniqueFd>& descriptors,
                     Deadline deadline) {
  ControlBuffer control;
  while (size > 0) {
    iovec part{data, size};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got == 0) throw NetworkError("the connection was closed");
    if (got < 0) {
      const int error = errno;
      if (error == EAGAIN) wait_for(socket, POLLIN, deadline);
      if (error == EAGAIN || error == EINTR) continue;
      throw NetworkError(errno_text("recvmsg", error));
    }
    collect(message, descriptors);
    if ((message.msg_flags & MSG_CTRUNC) != 0) {
      throw NetworkError(
          "not all descriptors could be received: too many open files. Hint: raise the limit of "
          "open files (ulimit -n)");
    }
    data += got;
    size -= static_cast<std::size_t>(got);
  }
}

void check_header(const Header& header, const FrameLimits& limits) {
  if (header.magic != kMagic) throw NetworkError("the peer sent something else than a message");
  if (header.num_bytes > limits.max_bytes || header.num_descriptors > limits.max_descriptors) {
    throw NetworkError(fmt::format(
        "the peer sent {} bytes and {} descriptors, at most {} and {} are taken", header.num_bytes,
        header.num_descriptors, limits.max_bytes, limits.max_descriptors));
  }
}

}  // namespace

void send_frame(int socket, const std::string& bytes, const std::vector<int>& descriptors,
                Deadline deadline) {
  LIBDDP_CHECK(descriptors.size() <= kKernelDescriptors, "too many descriptors in one message");
  Header header;
  header.num_bytes = static_cast<std::uint32_t>(bytes.size());
  header.num_descriptors = static_cast<std::uint32_t>(descriptors.size());
  std::string text(reinterpret_cast<const char*>(&header), sizeof(header));
  text += bytes;
  ControlBuffer control;
  for (std::size_t at = 0; at < text.size();) {
    iovec part{text.data() + at, text.size() - at};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (at == 0 && !descriptors.empty()) attach(message, control, descriptors);
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      const int error = errno;
      if (error == EAGAIN) wait_for(socket, POLLOUT, deadline);
      if (error == EAGAIN || error == EINTR) continue;
      throw NetworkError(errno_text("sendmsg", error));
    }
    at += static_cast<std::size_t>(sent);
  }
}

bool is_frame_complete(int socket, const FrameLimits& limits) {
  Header header;
  const ssize_t got = ::recv(socket, &header, sizeof(header), MSG_PEEK | MSG_DONTWAIT);
  if (got == 0) throw NetworkError("the connection was closed");
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    throw NetworkError(errno_text("recv", errno));
  }
  if (got < static_cast<ssize_t>(sizeof(header))) return false;
  check_header(header, limits);
  int num_waiting = 0;
  if (::ioctl(socket, FIONREAD, &num_waiting) != 0) {
    throw NetworkError(errno_text("ioctl(FIONREAD)", errno));
  }
  return static_cast<std::size_t>(num_waiting) >= sizeof(header) + header.num_bytes;
}

Frame receive_frame(int socket, const FrameLimits& limits, Deadline deadline) {
  Frame frame;
  Header header;
  receive_exactly(socket, reinterpret_cast<char*>(&header), sizeof(header), frame.descriptors,
                  deadline);
  check_header(header, limits);
  frame.bytes.resize(header.num_bytes);
  receive_exactly(socket, frame.bytes.data(), frame.bytes.size(), frame.descriptors, deadline);
  if (frame.descriptors.size() != header.num_descriptors) {
    throw NetworkError(fmt::format("the peer announced {} descriptors and passed {}",
                                   header.num_descriptors, frame.descriptors.size()));
  }
  return frame;
}

}  // namespace libddp
