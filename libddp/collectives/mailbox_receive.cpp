// Mailbox, the receiver's side.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/collectives/letter_matching.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {

bool Mailbox::take_envelopes(int peer) {
  Channel& channel = channels_[peer];
  const Outbox& theirs = outbox(peer, core_.rank());
  const std::uint64_t posted = theirs.envelopes_posted.load(std::memory_order_acquire);
  if (posted == channel.envelopes_taken) return false;
  for (; channel.envelopes_taken < posted; ++channel.envelopes_taken) {
    const Envelope& envelope = theirs.envelopes[channel.envelopes_taken % Outbox::kEnvelopes];
    Letter& letter = letters_.emplace_back();
    letter.source = peer;
    letter.message = channel.envelopes_taken;
    letter.tag = envelope.tag;
    letter.bytes = envelope.bytes;
    letter.place = envelope.place;
    if (letter.place == Slot::kInline) {
      const std::size_t bytes = std::min<std::uint64_t>(letter.bytes, Envelope::kInlineBytes);
      letter.payload.assign(envelope.payload, envelope.payload + bytes);
    }
  }
  inbox(core_.rank(), peer).envelopes_taken.store(posted, std::memory_order_seq_cst);
  wake(peer);
  return true;
}

// Letters in the order in which they came, each to the first receive that asks for it.
bool Mailbox::match_letters() {
  return libddp::match_letters(
      letters_, *parts_, [this](const Letter& letter) { return core_.group_rank(letter.source); },
      [this](Transfer& part, Letter& letter) { deliver(part, letter); });
}

void Mailbox::deliver(Transfer& part, Letter& letter) {
  if (part.bytes != letter.bytes) report_size(part, letter);
  Channel& channel = channels_[letter.source];
  part.is_started = true;
  part.source = core_.group_rank(letter.source);
  part.message = letter.message;
  if (letter.place == Slot::kStaged) {
    channel.receiving.push_back(&part);
    if (channel.receiving.size() == 1) channel.notices.push_back({{letter.message, 1}, nullptr});
    return;
  }
  const std::byte* from = letter.place == Slot::kInline
                              ? letter.payload.data()
                              : core_.reach(nullptr, letter.source, letter.place, letter.bytes);
  copy_bytes(part.data, from, letter.bytes);
  // A sender that has given up meanwhile may have put its memory to another use.
  const bool is_in_its_memory = letter.place != Slot::kInline;
  if (is_in_its_memory && core_.has_failed_at(letter.source)) core_.throw_if_failed(nullptr);
  channel.notices.push_back({{letter.message, 0}, &part});
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
      channel.notices.push_back({{channel.receiving.front()->message, 1}, nullptr});
    }
  }
  return moved;
}

bool Mailbox::post_notices(int peer) {
  Channel& channel = channels_[peer];
  if (channel.notices.empty()) return false;
  Inbox& mine = inbox(core_.rank(), peer);
  const Outbox& theirs = outbox(peer, core_.rank());
  bool moved = false;
  while (!channel.notices.empty() &&
         channel.notices_posted - theirs.notices_taken.load(std::memory_order_acquire) <
             Inbox::kNotices) {
    mine.notices[channel.notices_posted % Inbox::kNotices] = channel.notices.front().notice;
    mine.notices_posted.store(++channel.notices_posted, std::memory_order_seq_cst);
    if (Transfer* part = channel.notices.front().finishes) part->is_done = true;
    channel.notices.pop_front();
    moved = true;
  }
  if (moved) wake(peer);
  return moved;
}

void Mailbox::report_size(const Transfer& part, const Letter& letter) {
  core_.fail_and_throw(nullptr,
                       {.kind = CommFailure::Kind::Peer,
                        .message = fmt::format(
                            "message sizes differ: rank {} expects {} bytes with tag {} from rank "
                            "{}, which sends {} bytes. Hint: tensors of a send and its recv must "
                            "have equal numbers of bytes",
                            core_.group_rank(core_.rank()), part.bytes, letter.tag,
                            core_.group_rank(letter.source), letter.bytes)});
}

}  // namespace libddp
