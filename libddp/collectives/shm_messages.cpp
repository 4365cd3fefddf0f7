#include "libddp/collectives/shm_messages.h"

#include <algorithm>
#include <utility>

#include "libddp/collectives/mailbox.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {

ShmMessages::ShmMessages(const ShmPeers& peers, ShmFailure& failure, const WaitPolicy& policy)
    : peers_(peers), failure_(failure), policy_(policy), channels_(peers.world_size()) {}

void ShmMessages::forget_missing(const Mailbox& mailbox) {
  const auto is_missing = [&](const Transfer* transfer) {
    return transfer && !mailbox.knows(transfer);
  };
  for (Channel& channel : channels_) {
    if (is_missing(channel.streaming)) channel.streaming = nullptr;
    std::erase_if(channel.receiving, is_missing);
    for (PendingAck& pending : channel.acks) {
      if (is_missing(pending.finishes)) pending.finishes = nullptr;
    }
  }
}

bool ShmMessages::read(Mailbox& mailbox) {
  bool moved = false;
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    moved |= take_envelopes(peer, mailbox);
    moved |= take_acks(peer, mailbox);
    moved |= receive_chunks(peer);
  }
  return moved;
}

bool ShmMessages::write() {
  bool moved = false;
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    moved |= post_acks(peer);
    moved |= send_chunks(peer);
  }
  return moved;
}

void ShmMessages::begin_posting() {
  for (Channel& channel : channels_) channel.is_full = false;
}

bool ShmMessages::post(Transfer& send) {
  const int peer = peers_.index_of(send.peer);
  Channel& channel = channels_[peer];
  const Inbox& theirs = inbox(peer, peers_.rank());
  const std::uint64_t taken = theirs.envelopes_taken.load(std::memory_order_acquire);
  channel.is_full = channel.is_full || channel.envelopes_posted - taken >= Outbox::kEnvelopes;
  if (channel.is_full) return false;
  Outbox& mine = outbox(peers_.rank(), peer);
  Envelope& envelope = mine.envelopes[channel.envelopes_posted % Outbox::kEnvelopes];
  envelope.tag = send.tag;
  envelope.bytes = send.bytes;
  if (send.bytes <= Envelope::kInlineBytes) {
    envelope.place = Slot::kInline;
    copy_bytes(envelope.payload, send.data, send.bytes);
  } else {
    envelope.place = peers_.offset_of(send.data, send.bytes);
  }
  send.message = channel.envelopes_posted;
  mine.envelopes_posted.store(++channel.envelopes_posted, std::memory_order_seq_cst);
  wake(peer);
  return true;
}

bool ShmMessages::take_envelopes(int peer, Mailbox& mailbox) {
  Channel& channel = channels_[peer];
  const Outbox& theirs = outbox(peer, peers_.rank());
  const std::uint64_t posted = theirs.envelopes_posted.load(std::memory_order_acquire);
  if (posted == channel.envelopes_taken) return false;
  for (; channel.envelopes_taken < posted; ++channel.envelopes_taken) {
    const Envelope& envelope = theirs.envelopes[channel.envelopes_taken % Outbox::kEnvelopes];
    UnexpectedMessage message{.source = peers_.group_rank(peer),
                              .number = channel.envelopes_taken,
                              .tag = envelope.tag,
                              .bytes = envelope.bytes,
                              .place = envelope.place};
    if (message.place == Slot::kInline) {
      const std::size_t bytes = std::min<std::uint64_t>(message.bytes, Envelope::kInlineBytes);
      message.payload.assign(envelope.payload, envelope.payload + bytes);
    }
    mailbox.add(std::move(message));
  }
  inbox(peers_.rank(), peer).envelopes_taken.store(posted, std::memory_order_seq_cst);
  wake(peer);
  return true;
}

bool ShmMessages::take_acks(int peer, const Mailbox& mailbox) {
  Channel& channel = channels_[peer];
  const Inbox& theirs = inbox(peer, peers_.rank());
  const std::uint64_t posted = theirs.acks_posted.load(std::memory_order_acquire);
  if (posted == channel.acks_taken) return false;
  for (; channel.acks_taken < posted; ++channel.acks_taken) {
    const Inbox::Ack ack = theirs.acks[channel.acks_taken % Inbox::kAcks];
    Transfer* const send = mailbox.find_send(peers_.group_rank(peer), ack.message);
    if (send == nullptr) continue;
    if (ack.is_grant != 0) {
      // The peer grants the next message when it has taken all of the one before, which may not
      // have been seen here yet.
      if (channel.streaming) channel.streaming->is_done = true;
      channel.streaming = send;
    } else {
      send->is_done = true;
    }
  }
  outbox(peers_.rank(), peer).acks_taken.store(posted, std::memory_order_seq_cst);
  wake(peer);
  return true;
}

void ShmMessages::accept(Transfer& receive, UnexpectedMessage& message) {
  const int peer = peers_.index_of(message.source);
  Channel& channel = channels_[peer];
  if (message.place == Slot::kStaged) {
    channel.receiving.push_back(&receive);
    if (channel.receiving.size() == 1) channel.acks.push_back({{message.number, 1}, nullptr});
    return;
  }
  const bool is_inline = message.place == Slot::kInline;
  const std::byte* from = is_inline ? message.payload.data()
                                    : failure_.reach(nullptr, peer, message.place, message.bytes);
  copy_bytes(receive.data, from, message.bytes);
  // A sender that has given up meanwhile may have put its memory to another use.
  if (!is_inline && failure_.has_failed_at(peer)) failure_.throw_if_failed(nullptr);
  channel.acks.push_back({{message.number, 0}, &receive});
}

bool ShmMessages::receive_chunks(int peer) {
  Channel& channel = channels_[peer];
  bool moved = false;
  while (!channel.receiving.empty()) {
    Transfer& receive = *channel.receiving.front();
    const std::uint64_t posted =
        outbox(peer, peers_.rank()).chunks_posted.load(std::memory_order_acquire);
    if (posted == channel.chunks_taken) break;
    const std::uint64_t bytes =
        std::min<std::uint64_t>(ShmPage::kMailChunkBytes, receive.bytes - receive.moved_bytes);
    copy_bytes(static_cast<std::byte*>(receive.data) + receive.moved_bytes,
               peers_.page(peer).mail_chunk(peers_.rank(), channel.chunks_taken), bytes);
    receive.moved_bytes += bytes;
    inbox(peers_.rank(), peer)
        .chunks_taken.store(++channel.chunks_taken, std::memory_order_seq_cst);
    moved = true;
    wake(peer);
    if (receive.moved_bytes < receive.bytes) continue;
    receive.is_done = true;
    channel.receiving.pop_front();
    if (!channel.receiving.empty()) {
      channel.acks.push_back({{channel.receiving.front()->message, 1}, nullptr});
    }
  }
  return moved;
}

bool ShmMessages::post_acks(int peer) {
  Channel& channel = channels_[peer];
  if (channel.acks.empty()) return false;
  Inbox& mine = inbox(peers_.rank(), peer);
  const Outbox& theirs = outbox(peer, peers_.rank());
  bool moved = false;
  while (!channel.acks.empty() &&
         channel.acks_posted - theirs.acks_taken.load(std::memory_order_acquire) < Inbox::kAcks) {
    mine.acks[channel.acks_posted % Inbox::kAcks] = channel.acks.front().ack;
    mine.acks_posted.store(++channel.acks_posted, std::memory_order_seq_cst);
    if (Transfer* receive = channel.acks.front().finishes) receive->is_done = true;
    channel.acks.pop_front();
    moved = true;
  }
  if (moved) wake(peer);
  return moved;
}

// Two buffers: one fills while the peer empties the other. The send ends when the peer has taken
// the last chunk.
bool ShmMessages::send_chunks(int peer) {
  Channel& channel = channels_[peer];
  bool moved = false;
  while (channel.streaming != nullptr) {
    Transfer& send = *channel.streaming;
    const std::uint64_t taken =
        inbox(peer, peers_.rank()).chunks_taken.load(std::memory_order_acquire);
    const std::uint64_t in_flight = channel.chunks_posted - taken;
    if (send.moved_bytes == send.bytes) {
      if (in_flight > 0) break;
      send.is_done = true;
      channel.streaming = nullptr;
      return true;
    }
    if (in_flight >= 2) break;
    const std::uint64_t bytes =
        std::min<std::uint64_t>(ShmPage::kMailChunkBytes, send.bytes - send.moved_bytes);
    copy_bytes(peers_.own_page().mail_chunk(peer, channel.chunks_posted),
               static_cast<const std::byte*>(send.data) + send.moved_bytes, bytes);
    send.moved_bytes += bytes;
    outbox(peers_.rank(), peer)
        .chunks_posted.store(++channel.chunks_posted, std::memory_order_seq_cst);
    wake(peer);
    moved = true;
  }
  return moved;
}

std::uint32_t ShmMessages::ticket() const {
  return own_event().notifications.load(std::memory_order_seq_cst);
}

void ShmMessages::wait(std::uint32_t old_ticket, std::chrono::nanoseconds limit) {
  for (int i = 0; i < policy_.spins; ++i) {
    if (ticket() != old_ticket) return;
    relax_cpu();
  }
  Sleeper(own_event(), old_ticket).sleep(limit);
}

void ShmMessages::wake_own() noexcept { notify_always(own_event()); }

}  // namespace libddp
