#include "libddp/watchdog/control_message.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "libddp/base/printable.h"

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
         header.kind <= static_cast<std::uint8_t>(ControlMessage::Kind::Calls) &&
         header.failure_kind <= static_cast<std::uint8_t>(GroupFailure::Kind::Device) &&
         header.text_bytes <= ControlMessage::kMaxText;
}

ControlMessage decode(const Header& header, const std::string& text) {
  ControlMessage message;
  message.kind = static_cast<ControlMessage::Kind>(header.kind);
  message.sequence = header.sequence;
  message.number = header.number;
  message.failure.kind = static_cast<GroupFailure::Kind>(header.failure_kind);
  message.failure.peer_rank = header.peer_rank;
  message.failure.peer_pid = header.peer_pid;
  message.failure.message = printable_lines(text);
  return message;
}

}  // namespace

std::string ControlMessage::encode() const {
  const std::string& text = failure.message;
  const std::size_t text_bytes = std::min(text.size(), kMaxText);
  const Header header{kMagic,
                      static_cast<std::uint8_t>(kind),
                      static_cast<std::uint8_t>(failure.kind),
                      static_cast<std::uint16_t>(text_bytes),
                      sequence,
                      number,
                      failure.peer_rank,
                      failure.peer_pid};
  std::string bytes(sizeof(header) + text_bytes, '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), text.data(), text_bytes);
  return bytes;
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
  std::size_t at = 0;
  while (!is_garbled_ && bytes_.size() - at >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, bytes_.data() + at, sizeof(header));
    if (!is_valid(header)) {
      is_garbled_ = true;
      break;
    }
    if (bytes_.size() - at < sizeof(header) + header.text_bytes) break;
    messages.push_back(decode(header, bytes_.substr(at + sizeof(header), header.text_bytes)));
    at += sizeof(header) + header.text_bytes;
  }
  // Once for all: what lies behind a crowd of messages is moved up one time only.
  bytes_.erase(0, at);
  return messages;
}

}  // namespace libddp
