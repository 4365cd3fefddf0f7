#include "libddp/group/control_message.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

namespace libddp {
namespace {

constexpr std::uint32_t kMagic = 0x6c64647a;

/// Both ends run the same build on machines of one kind, so the bytes are those of memory.
struct Header {
  std::uint32_t magic;
  std::uint8_t kind;
  std::uint8_t failure_kind;
  std::uint16_t text_bytes;
  std::uint64_t sequence;
  std::uint64_t number;
  std::int32_t peer_rank;
  std::int32_t peer_pid;
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 32);

bool is_valid(const Header& header) {
  return header.magic == kMagic &&
         header.kind <= static_cast<std::uint8_t>(ControlMessage::Kind::Stacks) &&
         header.failure_kind <= static_cast<std::uint8_t>(MeshFailure::Kind::Aborted) &&
         header.text_bytes <= ControlMessage::kMaxText;
}

ControlMessage decode(const Header& header, std::string text) {
  ControlMessage message;
  message.kind = static_cast<ControlMessage::Kind>(header.kind);
  message.sequence = header.sequence;
  message.number = header.number;
  message.failure.kind = static_cast<MeshFailure::Kind>(header.failure_kind);
  message.failure.peer_rank = header.peer_rank;
  message.failure.peer_pid = header.peer_pid;
  message.failure.message = std::move(text);
  return message;
}

}  // namespace

bool send_control(int socket, const ControlMessage& message) noexcept {
  const std::string& text = message.failure.message;
  const std::size_t text_bytes = std::min(text.size(), ControlMessage::kMaxText);
  const Header header{kMagic,
                      static_cast<std::uint8_t>(message.kind),
                      static_cast<std::uint8_t>(message.failure.kind),
                      static_cast<std::uint16_t>(text_bytes),
                      message.sequence,
                      message.number,
                      message.failure.peer_rank,
                      message.failure.peer_pid};
  char bytes[sizeof(Header) + ControlMessage::kMaxText];
  std::memcpy(bytes, &header, sizeof(header));
  std::memcpy(bytes + sizeof(header), text.data(), text_bytes);
  const std::size_t size = sizeof(header) + text_bytes;
  ssize_t sent;
  do {
    sent = ::send(socket, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(size);
}

void ControlInbox::receive(int socket) {
  char chunk[4096];
  while (!is_closed_) {
    const ssize_t size = ::recv(socket, chunk, sizeof(chunk), MSG_DONTWAIT);
    if (size > 0) {
      bytes_.append(chunk, static_cast<std::size_t>(size));
    } else if (size == 0) {
      is_closed_ = true;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      is_closed_ = true;  // ECONNRESET: the peer closed with our last words unread
    }
  }
}

std::vector<ControlMessage> ControlInbox::take(int socket) {
  receive(socket);
  std::vector<ControlMessage> messages;
  while (!is_garbled_ && bytes_.size() >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, bytes_.data(), sizeof(header));
    if (!is_valid(header)) {
      is_garbled_ = true;
      break;
    }
    if (bytes_.size() < sizeof(header) + header.text_bytes) break;
    messages.push_back(decode(header, bytes_.substr(sizeof(header), header.text_bytes)));
    bytes_.erase(0, sizeof(header) + header.text_bytes);
  }
  return messages;
}

}  // namespace libddp
