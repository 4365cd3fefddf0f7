#include "libddp/collectives/link_mail.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/collectives/unexpected_matching.h"

namespace libddp {
namespace {

std::string name_of(const LinkMailPeer& peer) {
  return fmt::format("rank {} (pid {} on {})", peer.rank, peer.pid, peer.host_name);
}

}  // namespace

LinkMail::LinkMail(ShmComm& local, std::vector<LinkMailPeer> peers) : local_(local) {
  poller_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!poller_) throw NetworkError(errno_text("epoll_create1", errno));
  for (LinkMailPeer& peer : peers) {
    // Edge-triggered: `progress` always goes on until nothing moves, so each event means news.
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    if (::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, peer.socket.get(), &event) != 0) {
      throw NetworkError(errno_text("epoll_ctl", errno));
    }
    const auto rank = static_cast<std::size_t>(peer.rank);
    if (channel_of_.size() <= rank) channel_of_.resize(rank + 1, -1);
    channel_of_[rank] = static_cast<int>(channels_.size());
    health_.watch(peer.socket.get(), name_of(peer), peer.rank, peer.pid);
    channels_.emplace_back().peer = std::move(peer);
  }
}

void LinkMail::on_network() noexcept {
  epoll_event events[64];
  while (::epoll_wait(poller_.get(), events, 64, 0) == 64) {
  }
  local_.wake_mail();
}

void LinkMail::finish() noexcept {
  for (Channel& channel : channels_) ::shutdown(channel.peer.socket.get(), SHUT_WR);
}

bool LinkMail::has_read_all(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  const int channel = index < channel_of_.size() ? channel_of_[index] : -1;
  return channel < 0 || channels_[static_cast<std::size_t>(channel)].is_closed;
}

bool LinkMail::progress(const std::vector<Transfer*>& parts) {
  parts_ = &parts;
  forget_missing_parts();
  bool moved = false;
  while (poll_once()) moved = true;
  if (!moved) check_closed();
  return moved;
}

bool LinkMail::knows(const Transfer* part) const {
  return std::find(parts_->begin(), parts_->end(), part) != parts_->end();
}

// A part that its owner has given up may be gone: nothing here may point to it any more.
void LinkMail::forget_missing_parts() {
  const auto is_missing = [this](const Transfer* part) { return part && !knows(part); };
  for (Channel& channel : channels_) {
    std::erase_if(channel.receiving, is_missing);
    for (Ending& ending : channel.endings) {
      if (is_missing(ending.part)) ending.part = nullptr;
    }
    // One whose bytes are half out cannot be taken back: the stream would be out of step.
    const bool is_mid_chunk = channel.chunk_head_left > 0 || channel.chunk_left > 0;
    if (is_mid_chunk && is_missing(channel.granted.front())) {
      fail_and_throw(channel.peer, "a message to it was given up half sent");
    }
    std::erase_if(channel.granted, is_missing);
  }
}

bool LinkMail::poll_once() {
  bool moved = false;
  for (std::size_t i = 0; i < channels_.size(); ++i) moved |= read(i);
  moved |= match_unexpected();
  post_envelopes();
  for (Channel& channel : channels_) moved |= write(channel);
  return moved;
}

// The peer closed its end while something is still to come: mostly its process ended, which the
// control connection tells with more words, or it left, which the message queue knows.
void LinkMail::check_closed() {
  for (const Transfer* part : *parts_) {
    const int rank = part->source >= 0 ? part->source : part->peer;
    if (part->is_done || rank < 0) continue;
    const Channel& channel =
        channels_[static_cast<std::size_t>(channel_of_[static_cast<std::size_t>(rank)])];
    if (channel.is_closed && channel.closed_patience.expired()) {
      local_.fail(lost_connection({channel.peer.rank, channel.peer.pid, name_of(channel.peer)},
                                  channel.peer.socket.get(), channel.error));
      local_.throw_if_failed();
    }
  }
}

void LinkMail::fail_and_throw(const LinkMailPeer& peer, const std::string& text) {
  local_.fail(
      {CommFailure::Kind::Peer,
       fmt::format("{}: {}. Hint: look at that process's own output and at the network between "
                   "the hosts",
                   name_of(peer), text),
       peer.rank, peer.pid});
  local_.throw_if_failed();
  throw StateError("libddp: a failure was not kept");
}

bool LinkMail::match_unexpected() {
  return libddp::match_unexpected(
      unexpected_, *parts_,
      [this](const UnexpectedMessage& unexpected) {
        return channels_[unexpected.channel].peer.rank;
      },
      [this](Transfer& part, UnexpectedMessage& unexpected) { deliver(part, unexpected); });
}

void LinkMail::deliver(Transfer& part, UnexpectedMessage& unexpected) {
  Channel& channel = channels_[unexpected.channel];
  if (part.bytes != unexpected.bytes) {
    local_.fail({CommFailure::Kind::Peer,
                 fmt::format("message sizes differ: rank {} expects {} bytes with tag {} from rank "
                             "{}, which sends {} bytes. Hint: tensors of a send and its recv must "
                             "have equal numbers of bytes",
                             local_.rank(), part.bytes, unexpected.tag, channel.peer.rank,
                             unexpected.bytes),
                 channel.peer.rank, channel.peer.pid});
    local_.throw_if_failed();
  }
  part.is_started = true;
  part.source = channel.peer.rank;
  part.message = unexpected.message;
  FrameHead ack;
  ack.message = unexpected.message;
  if (unexpected.bytes > kInlineBytes) {
    channel.receiving.push_back(&part);
    ack.kind = FrameKind::Grant;
    return queue_frame(channel, ack);
  }
  std::copy(unexpected.payload.begin(), unexpected.payload.end(),
            static_cast<std::byte*>(part.data));
  ack.kind = FrameKind::Done;
  queue_ending(channel, ack, part);
}

}  // namespace libddp
