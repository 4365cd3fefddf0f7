#pragma once

// Point-to-point messages of a rank: which message belongs to which transfer. One mailbox serves
// all ranks of the group, those of this host and those of others; transports move the bytes (see
// message_transport.h for the words).
//
// Envelopes are taken in as they come and matched by source and tag in order, so no order of sends
// and receives can block a channel. Independent of the collectives.
// Thread rule: `progress` from one thread at a time; other threads may run collectives meanwhile.
//
//   Mailbox mailbox(comm, {&shm_messages});
//   Comm::Transfer receive{.peer = -1, .tag = 7, .data = pointer, .bytes = 64};
//   while (!receive.is_done) mailbox.progress({&receive});

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "libddp/collectives/message_transport.h"

namespace libddp {

class Mailbox {
 public:
  using Transfer = Comm::Transfer;

  /// `transports` reach every rank of `comm`, whose failures end it; all outlive the mailbox.
  Mailbox(Comm& comm, std::vector<MessageTransport*> transports);

  /// As Comm::progress.
  bool progress(const std::vector<Transfer*>& transfers);

  // For the transports, within a round.
  bool knows(const Transfer* transfer) const;
  /// The started send to `peer` with this number; null where its owner has given it up.
  Transfer* find_send(int peer, std::uint64_t number) const;
  void add(UnexpectedMessage message) { unexpected_.push_back(std::move(message)); }

 private:
  bool run_round();
  bool match();
  bool post();
  Transfer* find_receive(const UnexpectedMessage& message) const;
  void check_size(const Transfer& receive, const UnexpectedMessage& message);
  MessageTransport& transport_to(int rank) const;

  Comm& comm_;
  const std::vector<MessageTransport*> transports_;
  std::deque<UnexpectedMessage> unexpected_;
  /// The transfers that move now.
  const std::vector<Transfer*>* transfers_ = nullptr;
};

}  // namespace libddp
