#include "libddp/watchdog/control_outbox.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "libddp/base/log.h"

namespace libddp {
namespace {

using Kind = ControlMessage::Kind;

/// Of two messages about one subject the later one counts.
Kind subject_of(Kind kind) { return kind == Kind::Retraction ? Kind::Report : kind; }

}  // namespace

bool ControlOutbox::send(int socket, const ControlMessage& message) noexcept {
  if (is_gone_) return false;
  try {
    const Kind subject = subject_of(message.kind);
    const auto first = waiting_.begin() + (is_begun() ? 1 : 0);
    const auto is_older = [&](const Waiting& each) { return each.subject == subject; };
    waiting_.erase(std::remove_if(first, waiting_.end(), is_older), waiting_.end());
    waiting_.push_back({subject, message.encode()});
  } catch (const std::exception& error) {
    // Only memory can be short; what was begun before is whole all the same.
    log(LogLevel::Error, "control_message_lost", {{"reason", error.what()}});
    return false;
  }
  flush(socket);
  return !is_gone_;
}

void ControlOutbox::flush(int socket) noexcept {
  while (!waiting_.empty() && !is_gone_) {
    const std::string& bytes = waiting_.front().bytes;
    const ssize_t sent = ::send(socket, bytes.data() + num_sent_, bytes.size() - num_sent_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) {
      is_gone_ = true;  // its own socket tells the watchdog
      break;
    }
    num_sent_ += static_cast<std::size_t>(sent);
    if (num_sent_ < bytes.size()) continue;
    waiting_.pop_front();
    num_sent_ = 0;
  }
  if (!is_gone_) return;
  waiting_.clear();
  num_sent_ = 0;
}

}  // namespace libddp
