#pragma once

// Messages between the ranks of a host, through their control pages.
//
// A channel per ordered pair of ranks: the sender writes its Outbox, the receiver its Inbox, each
// in its own page, rings and counters only. Small payloads lie in the envelope; bytes in the
// sender's arena move by one copy out of it; others go in chunks through two buffers per channel,
// one message at a time. Thread rule: see message_transport.h; the event from any thread.
//
//   ShmMessages messages(peers, failure, policy);
//   Mailbox mailbox(comm, {&messages});
//   const std::uint32_t ticket = messages.ticket();
//   if (!mailbox.progress(transfers)) messages.wait(ticket, 100ms);

#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "libddp/collectives/futex_event.h"
#include "libddp/collectives/message_transport.h"
#include "libddp/collectives/shm_failure.h"
#include "libddp/collectives/shm_page.h"
#include "libddp/collectives/shm_peers.h"
#include "libddp/collectives/wait_policy.h"

namespace libddp {

class ShmMessages final : public MessageTransport {
 public:
  ShmMessages(const ShmPeers& peers, ShmFailure& failure, const WaitPolicy& policy);

  bool reaches(int rank) const override { return peers_.index_of(rank) >= 0; }
  void forget_missing(const Mailbox& mailbox) override;
  bool read(Mailbox& mailbox) override;
  void begin_posting() override;
  bool post(Transfer& send) override;
  void accept(Transfer& receive, UnexpectedMessage& message) override;
  bool write() override;

  // The event on which this rank waits for messages; see Comm.
  std::uint32_t ticket() const;
  void wait(std::uint32_t ticket, std::chrono::nanoseconds limit);
  void wake_own() noexcept;

 private:
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

  bool take_envelopes(int peer, Mailbox& mailbox);
  bool take_acks(int peer, const Mailbox& mailbox);
  bool receive_chunks(int peer);
  bool post_acks(int peer);
  bool send_chunks(int peer);

  FutexEvent& own_event() const { return peers_.own_page().mail_event(); }
  Outbox& outbox(int source, int target) { return peers_.page(source).outbox(target); }
  Inbox& inbox(int target, int source) { return peers_.page(target).inbox(source); }
  void wake(int peer) { notify_counted(peers_.page(peer).mail_event()); }

  const ShmPeers& peers_;
  ShmFailure& failure_;
  const WaitPolicy& policy_;
  /// By rank of this host.
  std::vector<Channel> channels_;
};

}  // namespace libddp
