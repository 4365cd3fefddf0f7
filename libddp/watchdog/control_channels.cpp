#include "libddp/watchdog/control_channels.h"

#include <utility>

#include "libddp/base/deadline.h"

namespace libddp {

ControlChannels::ControlChannels(std::vector<GroupPeer> peers, int own_rank) {
  for (GroupPeer& peer : peers) {
    if (peer.rank != own_rank) channels_.emplace_back(std::move(peer));
  }
  if (!channels_.empty()) unsent_ = EventFd::create();
}

bool ControlChannels::send_locked(Channel& channel, const ControlMessage& message) noexcept {
  const bool is_there = channel.outbox_.send(channel.peer.control.get(), message);
  if (!channel.outbox_.is_empty()) unsent_.set();
  return is_there;
}

bool ControlChannels::send_to(Channel& channel, const ControlMessage& message) noexcept {
  const std::lock_guard lock(mutex_);
  return send_locked(channel, message);
}

void ControlChannels::send_to_all(const ControlMessage& message) noexcept {
  const std::lock_guard lock(mutex_);
  for (Channel& channel : channels_) send_locked(channel, message);
}

void ControlChannels::announce(const GroupFailure& failure) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_announced_) return;
  is_announced_ = true;
  for (Channel& channel : channels_) {
    send_locked(channel, {.kind = ControlMessage::Kind::Failure, .failure = failure});
  }
}

void ControlChannels::add_unsent(std::vector<pollfd>& entries) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Channel& channel : channels_) {
    if (!channel.outbox_.is_empty()) entries.push_back({channel.peer.control.get(), POLLOUT, 0});
  }
}

void ControlChannels::add_polls(std::vector<pollfd>& entries) noexcept {
  entries.push_back({unsent_.fd(), POLLIN, 0});
  add_unsent(entries);
}

void ControlChannels::after_poll() noexcept {
  unsent_.clear();
  flush();
}

void ControlChannels::flush() noexcept {
  const std::lock_guard lock(mutex_);
  for (Channel& channel : channels_) channel.outbox_.flush(channel.peer.control.get());
}

void ControlChannels::wait_until_sent(std::chrono::milliseconds limit) noexcept {
  const Deadline patience = Deadline::after(limit);
  for (std::vector<pollfd> entries; !patience.expired(); entries.clear()) {
    add_unsent(entries);
    if (entries.empty()) return;
    ::poll(entries.data(), entries.size(), 50);
    flush();
  }
}

}  // namespace libddp
