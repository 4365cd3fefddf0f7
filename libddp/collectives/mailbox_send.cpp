// Mailbox, the sender's side.

#include <algorithm>

#include "libddp/collectives/mailbox.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {

// In the order of the parts. A ring that is full stays full for the whole pass: room that comes
// meanwhile must not go to a later message.
bool Mailbox::post_envelopes() {
  bool moved = false;
  for (Channel& channel : channels_) channel.is_full = false;
  for (Transfer* part : *parts_) {
    if (!part->is_send || part->is_started) continue;
    const int peer = core_.index_of(part->peer);
    Channel& channel = channels_[peer];
    const Inbox& theirs = inbox(peer, core_.rank());
    const std::uint64_t taken = theirs.envelopes_taken.load(std::memory_order_acquire);
    channel.is_full = channel.is_full || channel.envelopes_posted - taken >= Outbox::kEnvelopes;
    if (channel.is_full) continue;
    post_envelope(*part, peer);
    moved = true;
  }
  return moved;
}

void Mailbox::post_envelope(Transfer& part, int peer) {
  Channel& channel = channels_[peer];
  Outbox& mine = outbox(core_.rank(), peer);
  Envelope& envelope = mine.envelopes[channel.envelopes_posted % Outbox::kEnvelopes];
  envelope.tag = part.tag;
  envelope.bytes = part.bytes;
  if (part.bytes <= Envelope::kInlineBytes) {
    envelope.place = Slot::kInline;
    copy_bytes(envelope.payload, part.data, part.bytes);
  } else {
    envelope.place = core_.offset_of(part.data, part.bytes);
  }
  part.is_started = true;
  part.message = channel.envelopes_posted;
  mine.envelopes_posted.store(++channel.envelopes_posted, std::memory_order_seq_cst);
  wake(peer);
}

bool Mailbox::take_acks(int peer) {
  Channel& channel = channels_[peer];
  const Inbox& theirs = inbox(peer, core_.rank());
  const std::uint64_t posted = theirs.acks_posted.load(std::memory_order_acquire);
  if (posted == channel.acks_taken) return false;
  for (; channel.acks_taken < posted; ++channel.acks_taken) {
    const Inbox::Ack ack = theirs.acks[channel.acks_taken % Inbox::kAcks];
    const auto part = std::find_if(parts_->begin(), parts_->end(), [&](const Transfer* candidate) {
      return candidate->is_send && candidate->is_started &&
             candidate->peer == core_.group_rank(peer) && candidate->message == ack.message;
    });
    if (part == parts_->end()) continue;  // its owner has given it up
    if (ack.is_grant != 0) {
      // The peer grants the next message when it has taken all of the one before, which may not
      // have been seen here yet.
      if (channel.streaming) channel.streaming->is_done = true;
      channel.streaming = *part;
    } else {
      (*part)->is_done = true;
    }
  }
  outbox(core_.rank(), peer).acks_taken.store(posted, std::memory_order_seq_cst);
  wake(peer);
  return true;
}

// Two buffers: one fills while the peer empties the other. The part ends when the peer has taken
// the last chunk.
bool Mailbox::send_chunks(int peer) {
  Channel& channel = channels_[peer];
  bool moved = false;
  while (channel.streaming != nullptr) {
    Transfer& part = *channel.streaming;
    const std::uint64_t taken =
        inbox(peer, core_.rank()).chunks_taken.load(std::memory_order_acquire);
    const std::uint64_t in_flight = channel.chunks_posted - taken;
    if (part.moved_bytes == part.bytes) {
      if (in_flight > 0) break;
      part.is_done = true;
      channel.streaming = nullptr;
      return true;
    }
    if (in_flight >= 2) break;
    const std::uint64_t bytes =
        std::min<std::uint64_t>(ShmPage::kMailChunkBytes, part.bytes - part.moved_bytes);
    copy_bytes(core_.page(core_.rank()).mail_chunk(peer, channel.chunks_posted),
               static_cast<const std::byte*>(part.data) + part.moved_bytes, bytes);
    part.moved_bytes += bytes;
    outbox(core_.rank(), peer)
        .chunks_posted.store(++channel.chunks_posted, std::memory_order_seq_cst);
    wake(peer);
    moved = true;
  }
  return moved;
}

}  // namespace libddp
