// Mailbox, the receiver's side.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/unexpected_matching.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {

bool Mailbox::take_envelopes(int peer) {
  Channel& channel = channels_[peer];
  const Outbox& theirs = outbox(peer, core_.rank());
  const std::uint64_t posted = theirs.envelopes_posted.load(std::memory_order_acquire);
  if (posted == channel.envelopes_taken) return false;
  for (; channel.envelopes_taken < posted; ++channel.envelopes_taken) {
    const Envelope& envelope = theirs.envelopes[channel.envelopes_taken % Outbox::kEnvelopes];
    UnexpectedMessage& unexpected = unexpected_.emplace_back();
    unexpected.source = peer;
    unexpected.message = channel.envelopes_taken;
    unexpected.tag = envelope.tag;
    unexpected.bytes = envelope.bytes;
    unexpected.place = envelope.place;
    if (unexpected.place == Slot::kInline) {
      const std::size_t bytes = std::min<std::uint64_t>(unexpected.bytes, Envelope::kInlineBytes);
      unexpected.payload.assign(envelope.payload, envelope.payload + bytes);
    }
  }
  inbox(core_.rank(), peer).envelopes_taken.store(posted, std::memory_order_seq_cst);
  wake(peer);
  return true;
}

// Unexpected messages in the order in which they came, each to the first receive that asks for it.
bool Mailbox::match_unexpected() {
  return libddp::match_unexpected(
      unexpected_, *parts_,
      [this](const UnexpectedMessage& unexpected) { return core_.group_rank(unexpected.source); },
      [this](Transfer& part, UnexpectedMessage& unexpected) { deliver(part, unexpected); });
}

void Mailbox::deliver(Transfer& part, UnexpectedMessage& unexpected) {
  if (part.bytes != unexpected.bytes) report_size(part, unexpected);
  Channel& channel = channels_[unexpected.source];
  part.is_started = true;
  part.source = core_.group_rank(unexpected.source);
  part.message = unexpected.message;
  if (unexpected.place == Slot::kStaged) {
    channel.receiving.push_back(&part);
    if (channel.receiving.size() == 1) channel.acks.push_back({{unexpected.message, 1}, nullptr});
    return;
  }
  const std::byte* from =
      unexpected.place == Slot::kInline
          ? unexpected.payload.data()
          : core_.reach(nullptr, unexpected.source, unexpected.place, unexpected.bytes);
  copy_bytes(part.data, from, unexpected.bytes);
  // A sender that has given up meanwhile may have put its memory to another use.
  const bool is_in_its_memory = unexpected.place != Slot::kInline;
  if (is_in_its_memory && core_.has_failed_at(unexpected.source)) core_.throw_if_failed(nullptr);
  channel.acks.push_back({{unexpected.message, 0}, &part});
}

bool Mailbox::receive_chunks(int peer) {
  Channel& channel = channels_[peer];
  bool moved = false;
  while (!channel.receiving.empty()) {
    Transfer& part = *channel.receiving.front();
    const std::uint64_t posted =
        outbox(peer, core_.rank()).chunks_posted.load(std::memory_order_acquire);
    if (posted == channel.chunks_taken) break;
    const std::uint64_t bytes =
        std::min<std::uint64_t>(ShmPage::kMailChunkBytes, part.bytes - part.moved_bytes);
    copy_bytes(static_cast<std::byte*>(part.data) + part.moved_bytes,
               core_.page(peer).mail_chunk(core_.rank(), channel.chunks_taken), bytes);
    part.moved_bytes += bytes;
    inbox(core_.rank(), peer).chunks_taken.store(++channel.chunks_taken, std::memory_order_seq_cst);
    moved = true;
    wake(peer);
    if (part.moved_bytes < part.bytes) continue;
    part.is_done = true;
    channel.receiving.pop_front();
    if (!channel.receiving.empty()) {
      channel.acks.push_back({{channel.receiving.front()->message, 1}, nullptr});
    }
  }
  return moved;
}

bool Mailbox::post_acks(int peer) {
  Channel& channel = channels_[peer];
  if (channel.acks.empty()) return false;
  Inbox& mine = inbox(core_.rank(), peer);
  const Outbox& theirs = outbox(peer, core_.rank());
  bool moved = false;
  while (!channel.acks.empty() &&
         channel.acks_posted - theirs.acks_taken.load(std::memory_order_acquire) < Inbox::kAcks) {
    mine.acks[channel.acks_posted % Inbox::kAcks] = channel.acks.front().ack;
    mine.acks_posted.store(++channel.acks_posted, std::memory_order_seq_cst);
    if (Transfer* part = channel.acks.front().finishes) part->is_done = true;
    channel.acks.pop_front();
    moved = true;
  }
  if (moved) wake(peer);
  return moved;
}

void Mailbox::report_size(const Transfer& part, const UnexpectedMessage& unexpected) {
  core_.fail_and_throw(nullptr,
                       {.kind = CommFailure::Kind::Peer,
                        .message = fmt::format(
                            "message sizes differ: rank {} expects {} bytes with tag {} from rank "
                            "{}, which sends {} bytes. Hint: tensors of a send and its recv must "
                            "have equal numbers of bytes",
                            core_.group_rank(core_.rank()), part.bytes, unexpected.tag,
                            core_.group_rank(unexpected.source), unexpected.bytes)});
}

}  // namespace libddp
