// LinkMail, the frames on the connections.

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "libddp/collectives/link_mail.h"

namespace libddp {
namespace {

constexpr std::uint32_t kFrameMagic = 0x6c646d31;
/// Between two chunks of a large message small frames get their turn.
constexpr std::uint64_t kMailPieceBytes = 256u << 10;
/// Envelopes wait in their transfers rather than in the queue of a connection that is full.
constexpr std::size_t kMaxQueueBytes = 64u << 10;
/// A connection that closes without a word on the control connection is a loss of its own.
constexpr std::chrono::seconds kClosedPatience{2};

}  // namespace

void LinkMail::queue_frame(Channel& channel, const FrameHead& head, const void* payload,
                           std::size_t bytes) {
  FrameHead frame = head;
  frame.magic = kFrameMagic;
  const auto* first = reinterpret_cast<const std::byte*>(&frame);
  channel.queue.insert(channel.queue.end(), first, first + sizeof(frame));
  const auto* body = static_cast<const std::byte*>(payload);
  if (bytes > 0) channel.queue.insert(channel.queue.end(), body, body + bytes);
}

// In the order of the parts: a connection whose queue is full takes none of the later ones either.
void LinkMail::post_envelopes() {
  std::vector<bool> is_full(channels_.size());
  for (std::size_t i = 0; i < channels_.size(); ++i) {
    is_full[i] = channels_[i].queue.size() - channels_[i].queue_sent > kMaxQueueBytes;
  }
  for (Transfer* part : *parts_) {
    if (!part->is_send || part->is_started) continue;
    const auto index = static_cast<std::size_t>(channel_of_[static_cast<std::size_t>(part->peer)]);
    if (is_full[index]) continue;
    Channel& channel = channels_[index];
    FrameHead head;
    head.kind = FrameKind::Envelope;
    head.tag = part->tag;
    head.message = channel.messages_posted++;
    head.bytes = part->bytes;
    part->is_started = true;
    part->message = head.message;
    queue_frame(channel, head, part->data, part->bytes <= kInlineBytes ? part->bytes : 0);
    is_full[index] = channel.queue.size() - channel.queue_sent > kMaxQueueBytes;
  }
}

bool LinkMail::write(Channel& channel) {
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

bool LinkMail::write_queue(Channel& channel) {
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
    if (Transfer* part = channel.endings.front().part) part->is_done = true;
    channel.endings.pop_front();
  }
  return true;
}

void LinkMail::begin_chunk(Channel& channel) {
  const Transfer& part = *channel.granted.front();
  channel.chunk_left = std::min(kMailPieceBytes, part.bytes - part.moved_bytes);
  channel.chunk_head = {};
  channel.chunk_head.magic = kFrameMagic;
  channel.chunk_head.kind = FrameKind::Data;
  channel.chunk_head.message = part.message;
  channel.chunk_head.bytes = channel.chunk_left;
  channel.chunk_head_left = sizeof(FrameHead);
}

bool LinkMail::write_chunk(Channel& channel) {
  Transfer& part = *channel.granted.front();
  const auto* head = reinterpret_cast<const std::byte*>(&channel.chunk_head);
  const bool is_head = channel.chunk_head_left > 0;
  const std::byte* from = is_head ? head + sizeof(FrameHead) - channel.chunk_head_left
                                  : static_cast<const std::byte*>(part.data) + part.moved_bytes;
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
  part.moved_bytes += static_cast<std::uint64_t>(sent);
  if (part.moved_bytes == part.bytes) channel.granted.pop_front();
  return true;
}

bool LinkMail::read(std::size_t index) {
  Channel& channel = channels_[index];
  bool moved = false;
  while (!channel.is_closed) {
    const bool has_head = channel.head_bytes == sizeof(FrameHead);
    if (!(has_head ? read_body(index) : read_head(channel))) break;
    moved = true;
  }
  return moved;
}

std::size_t LinkMail::receive(Channel& channel, void* data, std::size_t bytes) {
  const ssize_t got = ::recv(channel.peer.socket.get(), data, bytes, MSG_DONTWAIT);
  if (got > 0) return static_cast<std::size_t>(got);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  channel.error = got < 0 ? errno : 0;
  channel.is_closed = true;
  channel.closed_patience = Deadline::after(kClosedPatience);
  return 0;
}

bool LinkMail::read_head(Channel& channel) {
  auto* to = reinterpret_cast<std::byte*>(&channel.head);
  const std::size_t got =
      receive(channel, to + channel.head_bytes, sizeof(FrameHead) - channel.head_bytes);
  channel.head_bytes += got;
  if (channel.head_bytes < sizeof(FrameHead)) return got > 0;
  const FrameHead& head = channel.head;
  channel.body_bytes = 0;
  channel.body.clear();
  if (head.magic != kFrameMagic || head.kind > FrameKind::Data ||
      (head.kind == FrameKind::Data && (head.bytes == 0 || head.bytes > kMailPieceBytes))) {
    fail_and_throw(channel.peer, "it sent bytes that are no message of this library");
  }
  if (head.kind == FrameKind::Envelope && head.bytes <= kInlineBytes) {
    channel.body.resize(head.bytes);
  }
  return true;
}

// The rest of a frame: a small payload, a piece of a large one, or nothing.
bool LinkMail::read_body(std::size_t index) {
  Channel& channel = channels_[index];
  const FrameHead& head = channel.head;
  if (head.kind == FrameKind::Data) {
    const auto found =
        std::find_if(channel.receiving.begin(), channel.receiving.end(),
                     [&](const Transfer* part) { return part->message == head.message; });
    if (found == channel.receiving.end() || head.bytes > (*found)->bytes) {
      fail_and_throw(channel.peer, "it sent a message that was not asked for or was given up");
    }
    Transfer& part = **found;
    const std::size_t got =
        receive(channel, static_cast<std::byte*>(part.data) + part.moved_bytes,
                std::min(head.bytes - channel.body_bytes, part.bytes - part.moved_bytes));
    if (got == 0) return false;
    part.moved_bytes += got;
    channel.body_bytes += got;
    if (channel.body_bytes == head.bytes) channel.head_bytes = 0;
    if (part.moved_bytes == part.bytes) {
      channel.receiving.erase(found);
      FrameHead ack;
      ack.kind = FrameKind::Done;
      ack.message = part.message;
      queue_ending(channel, ack, part);
    }
    return true;
  }
  if (channel.body_bytes < channel.body.size()) {
    const std::size_t got = receive(channel, channel.body.data() + channel.body_bytes,
                                    channel.body.size() - channel.body_bytes);
    channel.body_bytes += got;
    if (channel.body_bytes < channel.body.size()) return got > 0;
  }
  channel.head_bytes = 0;
  if (head.kind == FrameKind::Envelope) {
    unexpected_.push_back({index, head.message, head.tag, head.bytes, std::move(channel.body)});
    channel.body.clear();
  } else {
    take_ack(channel);
  }
  return true;
}

void LinkMail::take_ack(Channel& channel) {
  const FrameHead& head = channel.head;
  const auto part = std::find_if(parts_->begin(), parts_->end(), [&](const Transfer* candidate) {
    return candidate->is_send && candidate->is_started && candidate->peer == channel.peer.rank &&
           candidate->message == head.message;
  });
  if (part == parts_->end()) return;  // its owner has given it up
  const bool is_inline = (*part)->bytes <= kInlineBytes;
  const bool is_sent = is_inline || (*part)->moved_bytes == (*part)->bytes;
  const bool can_grant =
      !is_inline && (*part)->moved_bytes == 0 &&
      std::find(channel.granted.begin(), channel.granted.end(), *part) == channel.granted.end();
  if (head.kind == FrameKind::Done && is_sent) {
    (*part)->is_done = true;
  } else if (head.kind == FrameKind::Grant && can_grant) {
    channel.granted.push_back(*part);
  } else {
    fail_and_throw(channel.peer, "it answered a message that it cannot have had, or asked twice");
  }
}

// The receive ends when its ack has left: its owner may leave then, and the sender waits for it.
void LinkMail::queue_ending(Channel& channel, const FrameHead& ack, Transfer& part) {
  queue_frame(channel, ack);
  channel.endings.push_back(
      {channel.queue_sent_ever + channel.queue.size() - channel.queue_sent, &part});
}

}  // namespace libddp
