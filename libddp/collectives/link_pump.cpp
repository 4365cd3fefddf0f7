#include "libddp/collectives/link_pump.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "libddp/base/interrupt.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

/// One flow moves at most so much in one turn, so that all of them go on.
constexpr std::size_t kMostBytesPerTurn = 1u << 20;

}  // namespace

bool LinkPump::is_done() const {
  return std::all_of(flows_.begin(), flows_.end(),
                     [](const LinkFlow& flow) { return flow.is_done(); });
}

bool LinkPump::move() {
  std::size_t moved = 0;
  for (LinkFlow& flow : flows_) {
    std::size_t turn = 0;
    while (flow.can_move() && turn < kMostBytesPerTurn) {
      const std::size_t bytes = move_some(flow);
      if (bytes == 0) break;
      turn += bytes;
    }
    moved += turn;
  }
  return moved > 0;
}

std::size_t LinkPump::move_some(LinkFlow& flow) {
  const std::size_t at = flow.ring > 0 ? flow.done % flow.ring : flow.done;
  std::size_t most = flow.open - flow.done;
  if (flow.ring > 0) most = std::min(most, flow.ring - at);
  while (true) {
    const ssize_t size =
        flow.is_send ? ::send(flow.socket, flow.data + at, most, MSG_NOSIGNAL | MSG_DONTWAIT)
                     : ::recv(flow.socket, flow.data + at, most, MSG_DONTWAIT);
    if (size > 0) {
      flow.done += static_cast<std::size_t>(size);
      return static_cast<std::size_t>(size);
    }
    const int error = errno;
    if (size < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return 0;
    if (size < 0 && error == EINTR) continue;
    watch_.report_lost(flow, size == 0 ? "the connection was closed"
                                       : errno_text(flow.is_send ? "send" : "recv", error));
  }
}

void LinkPump::wait() {
  std::vector<pollfd> entries;
  for (const LinkFlow& flow : flows_) {
    if (!flow.can_move()) continue;
    entries.push_back({flow.socket, static_cast<short>(flow.is_send ? POLLOUT : POLLIN), 0});
  }
  const int ready =
      ::poll(entries.data(), entries.size(), static_cast<int>(kInterruptPeriod.count()));
  if (ready <= 0) watch_.check(flows_);
}

}  // namespace libddp
