#pragma once

// Point-to-point messages between the ranks of a host, independent of the collectives.
//
// Words: *envelope* = what a sender posts (tag, size, place of the bytes; small payloads inside);
// *unexpected message* = an envelope that the receiver has taken out of the ring and not matched
// yet; *ack* = what the receiver tells the sender: "send the chunks" (grant) or "done"; *part* =
// one transfer of a batch.
//
// A channel per ordered pair of ranks: the sender writes its Outbox, the receiver its Inbox, each
// in its own page, rings and counters only. Envelopes are taken out as they come and matched by tag
// in order, so no order of sends and receives can block a ring. Bytes move by one copy out of the
// sender's arena, or in chunks through two buffers per channel.
// Thread rule: one `run` at a time; other threads may run collectives meanwhile.
//
//   Mailbox mail(core);
//   ShmComm::Transfer recv{.peer = -1, .tag = 7, .data = pointer, .bytes = 64};
//   int source = mail.run(call, recv);

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "libddp/collectives/shm_core.h"

namespace libddp {

class Mailbox {
 public:
  using Transfer = ShmComm::Transfer;

  explicit Mailbox(ShmCore& core);

  /// Runs all parts to their end, in any order that the peers allow.
  void run(const CommCall& call, std::span<Transfer> parts);
  /// Moves every part as far as it goes; see ShmComm::progress.
  bool progress(const std::vector<Transfer*>& parts);

  /// See ShmComm.
  std::uint32_t ticket() const;
  void wait(std::uint32_t ticket, std::chrono::nanoseconds limit);
  void wake_own() noexcept;

 private:
  class AllDone;

  struct UnexpectedMessage {
    int source = 0;
    std::uint64_t message = 0;
    std::int32_t tag = 0;
    std::uint64_t bytes = 0;
    std::uint64_t place = 0;
    std::vector<std::byte> payload;
  };
  struct PendingAck {
    Inbox::Ack ack;
    /// Finished when the ack is out: a receiver may not leave before, the sender waits for it.
    Transfer* finishes = nullptr;
  };
  /// Both directions between this rank and one peer.
  struct Channel {
    // As the source.
    std::uint64_t envelopes_posted = 0;
    std::uint64_t chunks_posted = 0;
    std::uint64_t acks_taken = 0;
    Transfer* streaming = nullptr;
    bool is_full = false;
    // As the target.
    std::uint64_t envelopes_taken = 0;
    std::uint64_t chunks_taken = 0;
    std::uint64_t acks_posted = 0;
    std::deque<PendingAck> acks;
    std::deque<Transfer*> receiving;  // staged messages, the first one is under way
  };

  void forget_missing_parts();
  /// One round over everything that can move; false if nothing did.
  bool poll();
  bool take_envelopes(int peer);
  bool match_unexpected();
  void deliver(Transfer& part, UnexpectedMessage& unexpected);
  bool receive_chunks(int peer);
  bool post_acks(int peer);
  bool post_envelopes();
  void post_envelope(Transfer& part, int peer);
  bool take_acks(int peer);
  bool send_chunks(int peer);
  bool knows(const Transfer* part) const;
  [[noreturn]] void report_size(const Transfer& part, const UnexpectedMessage& unexpected);

  Outbox& outbox(int source, int target) { return core_.page(source).outbox(target); }
  Inbox& inbox(int target, int source) { return core_.page(target).inbox(source); }
  void wake(int peer) { notify_counted(core_.page(peer).mail_event()); }

  ShmCore& core_;
  std::vector<Channel> channels_;
  std::deque<UnexpectedMessage> unexpected_;
  /// The parts that move now.
  const std::vector<Transfer*>* parts_ = nullptr;
  /// Storage for `run`, kept from call to call.
  std::vector<Transfer*> run_parts_;
};

}  // namespace libddp
