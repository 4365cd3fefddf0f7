#include "libddp/collectives/link_messages.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/shm_comm.h"

namespace libddp {
namespace {

constexpr std::uint32_t kFrameMagic = 0x6c646d31;
/// Between two chunks of a large message small frames get their turn.
constexpr std::uint64_t kChunkBytes = 256u << 10;
/// Envelopes wait in their transfers rather than in the queue of a connection that is full.
constexpr std::size_t kMaxQueueBytes = 64u << 10;
/// A connection that closes without a word on the control connection is a loss of its own.
constexpr std::chrono::seconds kClosedPatience{2};

std::string name_of(const LinkMessagesPeer& peer) {
  return fmt::format("rank {} (pid {} on {})", peer.rank, peer.pid, peer.host_name);
}

}  // namespace

LinkMessages::LinkMessages(ShmComm& local, std::vector<LinkMessagesPeer> peers) : local_(local) {
  poller_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!poller_) throw NetworkError(errno_text("epoll_create1", errno));
  for (LinkMessagesPeer& peer : peers) {
    // Edge-triggered: the mailbox always goes on until nothing moves, so each event means news.
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

const LinkMessages::Channel* LinkMessages::find(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  const int channel = index < channel_of_.size() ? channel_of_[index] : -1;
  return channel < 0 ? nullptr : &channels_[static_cast<std::size_t>(channel)];
}

void LinkMessages::on_network() noexcept {
  epoll_event events[64];
  while (::epoll_wait(poller_.get(), events, 64, 0) == 64) {
  }
  local_.wake_mail();
}

void LinkMessages::finish() noexcept {
  for (Channel& channel : channels_) ::shutdown(channel.peer.socket.get(), SHUT_WR);
}

bool LinkMessages::has_read_all(int rank) const {
  const Channel* const channel = find(rank);
  return channel == nullptr || channel->is_closed;
}

void LinkMessages::forget_missing(const Mailbox& mailbox) {
  const auto is_missing = [&](const Transfer* transfer) {
    return transfer && !mailbox.knows(transfer);
  };
  for (Channel& channel : channels_) {
    std::erase_if(channel.receiving, is_missing);
    for (Ending& ending : channel.endings) {
      if (is_missing(ending.receive)) ending.receive = nullptr;
    }
    // One whose bytes are half out cannot be taken back: the stream would be out of step.
    const bool is_mid_chunk = channel.chunk_head_left > 0 || channel.chunk_left > 0;
    if (is_mid_chunk && is_missing(channel.granted.front())) {
      fail_and_throw(channel.peer, "a message to it was given up half sent");
    }
    std::erase_if(channel.granted, is_missing);
  }
}

// The peer closed its end while something is still to come: mostly its process ended, which the
// control connection tells with more words, or it left, which the message queue knows.
void LinkMessages::check(const std::vector<Transfer*>& transfers) {
  for (const Transfer* transfer : transfers) {
    const int rank = transfer->source >= 0 ? transfer->source : transfer->peer;
    const Channel* const channel = transfer->is_done || rank < 0 ? nullptr : find(rank);
    if (channel == nullptr || !channel->is_closed || !channel->closed_patience.expired()) continue;
    const LinkMessagesPeer& peer = channel->peer;
    local_.fail(
        lost_connection({peer.rank, peer.pid, name_of(peer)}, peer.socket.get(), channel->error));
    local_.throw_if_failed();
  }
}

void LinkMessages::fail_and_throw(const LinkMessagesPeer& peer, const std::string& text) {
  local_.fail(
      {GroupFailure::Kind::Peer,
       fmt::format("{}: {}. Hint: look at that process's own output and at the network between "
                   "the hosts",
                   name_of(peer), text),
       peer.rank, peer.pid});
  local_.throw_if_failed();
  throw StateError("libddp: a failure was not kept");
}

void LinkMessages::begin_posting() {
  for (Channel& channel : channels_) channel.is_full = is_queue_full(channel);
}

bool LinkMessages::is_queue_full(const Channel& channel) {
  return channel.queue.size() - channel.queue_sent > kMaxQueueBytes;
}

bool LinkMessages::post(Transfer& send) {
  Channel& channel = channel_to(send.peer);
  if (channel.is_full) return false;
  FrameHead head;
  head.kind = FrameKind::Envelope;
  head.tag = send.tag;
  head.message = channel.messages_posted++;
  head.bytes = send.bytes;
  send.message = head.message;
  queue_frame(channel, head, send.data, send.bytes <= kInlineBytes ? send.bytes : 0);
  channel.is_full = is_queue_full(channel);
  return true;
}

void LinkMessages::accept(Transfer& receive, UnexpectedMessage& message) {
  Channel& channel = channel_to(message.source);
  FrameHead ack;
  ack.message = message.number;
  if (message.bytes > kInlineBytes) {
    channel.receiving.push_back(&receive);
    ack.kind = FrameKind::Grant;
    return queue_frame(channel, ack);
  }
  std::copy(message.payload.begin(), message.payload.end(), static_cast<std::byte*>(receive.data));
  ack.kind = FrameKind::Done;
  queue_ending(channel, ack, receive);
}

bool LinkMessages::write() {
  bool moved = false;
  for (Channel& channel : channels_) moved |= write(channel);
  return moved;
}

void LinkMessages::queue_frame(Channel& channel, const FrameHead& head, const void* payload,
                               std::size_t bytes) {
  FrameHead frame = head;
  frame.magic = kFrameMagic;
  const auto* first = reinterpret_cast<const std::byte*>(&frame);
  channel.queue.insert(channel.queue.end(), first, first + sizeof(frame));
  const auto* body = static_cast<const std::byte*>(payload);
  if (bytes > 0) channel.queue.insert(channel.queue.end(), body, body + bytes);
}

bool LinkMessages::write(Channel& channel) {
  bool moved = false;
  while (!channel.is_closed) {
    // Frames go between two chunks, never into one.
    if (channel.chunk_left > 0) {
      if (!write_chunk(channel)) break;
    } else if (channel.queue_sent < channel.queue.size()) {
      if (!write_queue(channel)) break;
    } else if (!channel.granted.empty()) {
      begin_chunk(channel);
    } else {
      break;
    }
    moved = true;
  }
  return moved;
}

bool LinkMessages::write_queue(Channel& channel) {
  const ssize_t sent =
      ::send(channel.peer.socket.get(), channel.queue.data() + channel.queue_sent,
             channel.queue.size() - channel.queue_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent <= 0) return false;  // full, or lost, which the reading side finds
  channel.queue_sent += static_cast<std::size_t>(sent);
  channel.queue_sent_ever += static_cast<std::uint64_t>(sent);
  if (channel.queue_sent == channel.queue.size()) {
    channel.queue.clear();
    channel.queue_sent = 0;
  }
  while (!channel.endings.empty() && channel.endings.front().at <= channel.queue_sent_ever) {
    if (Transfer* receive = channel.endings.front().receive) receive->is_done = true;
    channel.endings.pop_front();
  }
  return true;
}

void LinkMessages::begin_chunk(Channel& channel) {
  const Transfer& send = *channel.granted.front();
  channel.chunk_left = std::min(kChunkBytes, send.bytes - send.moved_bytes);
  channel.chunk_head = {};
  channel.chunk_head.magic = kFrameMagic;
  channel.chunk_head.kind = FrameKind::Data;
  channel.chunk_head.message = send.message;
  channel.chunk_head.bytes = channel.chunk_left;
  channel.chunk_head_left = sizeof(FrameHead);
}

bool LinkMessages::write_chunk(Channel& channel) {
  Transfer& send = *channel.granted.front();
  const auto* head = reinterpret_cast<const std::byte*>(&channel.chunk_head);
  const bool is_head = channel.chunk_head_left > 0;
  const std::byte* from = is_head ? head + sizeof(FrameHead) - channel.chunk_head_left
                                  : static_cast<const std::byte*>(send.data) + send.moved_bytes;
  const std::size_t most = is_head ? channel.chunk_head_left : channel.chunk_left;
  // MSG_MORE: the head leaves with the first bytes.
  const int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (is_head ? MSG_MORE : 0);
  const ssize_t sent = ::send(channel.peer.socket.get(), from, most, flags);
  if (sent <= 0) return false;
  if (is_head) {
    channel.chunk_head_left -= static_cast<std::size_t>(sent);
    return true;
  }
  channel.chunk_left -= static_cast<std::uint64_t>(sent);
  send.moved_bytes += static_cast<std::uint64_t>(sent);
  if (send.moved_bytes == send.bytes) channel.granted.pop_front();
  return true;
}

// The receive ends when its ack has left: its owner may leave then, and the sender waits for it.
void LinkMessages::queue_ending(Channel& channel, const FrameHead& ack, Transfer& receive) {
  queue_frame(channel, ack);
  channel.endings.push_back(
      {channel.queue_sent_ever + channel.queue.size() - channel.queue_sent, &receive});
}

bool LinkMessages::read(Mailbox& mailbox) {
  bool moved = false;
  for (Channel& channel : channels_) moved |= read(channel, mailbox);
  return moved;
}

bool LinkMessages::read(Channel& channel, Mailbox& mailbox) {
  bool moved = false;
  while (!channel.is_closed) {
    const bool has_head = channel.head_bytes == sizeof(FrameHead);
    if (!(has_head ? read_body(channel, mailbox) : read_head(channel))) break;
    moved = true;
  }
  return moved;
}

std::size_t LinkMessages::receive(Channel& channel, void* data, std::size_t bytes) {
  const ssize_t got = ::recv(channel.peer.socket.get(), data, bytes, MSG_DONTWAIT);
  if (got > 0) return static_cast<std::size_t>(got);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  channel.error = got < 0 ? errno : 0;
  channel.is_closed = true;
  channel.closed_patience = Deadline::after(kClosedPatience);
  return 0;
}

bool LinkMessages::read_head(Channel& channel) {
  auto* to = reinterpret_cast<std::byte*>(&channel.head);
  const std::size_t got =
      receive(channel, to + channel.head_bytes, sizeof(FrameHead) - channel.head_bytes);
  channel.head_bytes += got;
  if (channel.head_bytes < sizeof(FrameHead)) return got > 0;
  const FrameHead& head = channel.head;
  channel.body_bytes = 0;
  channel.body.clear();
  if (head.magic != kFrameMagic || head.kind > FrameKind::Data ||
      (head.kind == FrameKind::Data && (head.bytes == 0 || head.bytes > kChunkBytes))) {
    fail_and_throw(channel.peer, "it sent bytes that are no message of this library");
  }
  if (head.kind == FrameKind::Envelope && head.bytes <= kInlineBytes) {
    channel.body.resize(head.bytes);
  }
  return true;
}

// The rest of a frame: a small payload, a piece of a large one, or nothing.
bool LinkMessages::read_body(Channel& channel, Mailbox& mailbox) {
  const FrameHead& head = channel.head;
  if (head.kind == FrameKind::Data) return read_data(channel);
  if (channel.body_bytes < channel.body.size()) {
    const std::size_t got = receive(channel, channel.body.data() + channel.body_bytes,
                                    channel.body.size() - channel.body_bytes);
    channel.body_bytes += got;
    if (channel.body_bytes < channel.body.size()) return got > 0;
  }
  channel.head_bytes = 0;
  if (head.kind != FrameKind::Envelope) {
    take_ack(channel, mailbox);
    return true;
  }
  mailbox.add({.source = channel.peer.rank,
               .number = head.message,
               .tag = head.tag,
               .bytes = head.bytes,
               .payload = std::move(channel.body)});
  channel.body.clear();
  return true;
}

bool LinkMessages::read_data(Channel& channel) {
  const FrameHead& head = channel.head;
  const auto found =
      std::find_if(channel.receiving.begin(), channel.receiving.end(),
                   [&](const Transfer* receive) { return receive->message == head.message; });
  if (found == channel.receiving.end() || head.bytes > (*found)->bytes) {
    fail_and_throw(channel.peer, "it sent a message that was not asked for or was given up");
  }
  Transfer& to = **found;
  const std::size_t got =
      receive(channel, static_cast<std::byte*>(to.data) + to.moved_bytes,
              std::min(head.bytes - channel.body_bytes, to.bytes - to.moved_bytes));
  if (got == 0) return false;
  to.moved_bytes += got;
  channel.body_bytes += got;
  if (channel.body_bytes == head.bytes) channel.head_bytes = 0;
  if (to.moved_bytes < to.bytes) return true;
  channel.receiving.erase(found);
  FrameHead ack;
  ack.kind = FrameKind::Done;
  ack.message = to.message;
  queue_ending(channel, ack, to);
  return true;
}

void LinkMessages::take_ack(Channel& channel, const Mailbox& mailbox) {
  const FrameHead& head = channel.head;
  Transfer* const send = mailbox.find_send(channel.peer.rank, head.message);
  if (send == nullptr) return;
  const bool is_inline = send->bytes <= kInlineBytes;
  const bool is_sent = is_inline || send->moved_bytes == send->bytes;
  const bool can_grant =
      !is_inline && send->moved_bytes == 0 &&
      std::find(channel.granted.begin(), channel.granted.end(), send) == channel.granted.end();
  if (head.kind == FrameKind::Done && is_sent) {
    send->is_done = true;
  } else if (head.kind == FrameKind::Grant && can_grant) {
    channel.granted.push_back(send);
  } else {
    fail_and_throw(channel.peer, "it answered a message that it cannot have had, or asked twice");
  }
}

}  // namespace libddp
