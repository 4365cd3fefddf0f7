#include "libddp/collectives/link_pump.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "libddp/base/interrupt.h"

namespace libddp {
namespace {

/// One flow moves at most so much in one turn, so that all of them go on.
constexpr std::size_t kMostBytesPerTurn = 1u << 20;

void advance(LinkFlow& flow, FlowStream& stream, std::size_t bytes) {
  stream.at += bytes;
  // The next stripe of this stream lies behind one of each other stream.
  const std::size_t num_others = flow.streams.size() - 1;
  if (stream.at % LinkPump::kStripeBytes == 0) stream.at += num_others * LinkPump::kStripeBytes;
  flow.done = flow.bytes;
  for (const FlowStream& each : flow.streams) flow.done = std::min(flow.done, each.at);
}

}  // namespace

LinkFlow& LinkPump::add(int socket, LinkFlow flow) {
  flow.streams = {{socket}};
  return flows_.emplace_back(std::move(flow));
}

LinkFlow& LinkPump::add(const std::vector<UniqueFd>& sockets, LinkFlow flow) {
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    flow.streams.push_back({sockets[i].get(), i * kStripeBytes});
  }
  return flows_.emplace_back(std::move(flow));
}

bool LinkPump::is_done() const {
  return std::all_of(flows_.begin(), flows_.end(),
                     [](const LinkFlow& flow) { return flow.is_done(); });
}

bool LinkPump::move() {
  bool moved = false;
  for (LinkFlow& flow : flows_) {
    for (FlowStream& stream : flow.streams) {
      std::size_t turn = 0;
      while (stream.at < flow.open && turn < kMostBytesPerTurn) {
        const std::size_t bytes = move_some(flow, stream);
        if (bytes == 0) break;
        turn += bytes;
      }
      moved = moved || turn > 0;
    }
  }
  return moved;
}

std::size_t LinkPump::move_some(LinkFlow& flow, FlowStream& stream) {
  const std::size_t at = flow.ring > 0 ? stream.at % flow.ring : stream.at;
  std::size_t most = flow.open - stream.at;
  if (flow.ring > 0) most = std::min(most, flow.ring - at);
  if (flow.streams.size() > 1) most = std::min(most, kStripeBytes - stream.at % kStripeBytes);
  while (true) {
    const ssize_t size =
        flow.is_send ? ::send(stream.socket, flow.data + at, most, MSG_NOSIGNAL | MSG_DONTWAIT)
                     : ::recv(stream.socket, flow.data + at, most, MSG_DONTWAIT);
    if (size > 0) {
      advance(flow, stream, static_cast<std::size_t>(size));
      return static_cast<std::size_t>(size);
    }
    const int error = errno;
    if (size < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return 0;
    if (size < 0 && error == EINTR) continue;
    watch_.report_lost(flow, stream.socket, size == 0 ? 0 : error);
  }
}

void LinkPump::wait() {
  std::vector<pollfd> entries;
  for (const LinkFlow& flow : flows_) {
    const auto events = static_cast<short>(flow.is_send ? POLLOUT : POLLIN);
    for (const FlowStream& stream : flow.streams) {
      if (stream.at < flow.open) entries.push_back({stream.socket, events, 0});
    }
  }
  const int ready =
      ::poll(entries.data(), entries.size(), static_cast<int>(kInterruptPeriod.count()));
  if (ready <= 0) watch_.check(flows_);
}

}  // namespace libddp
