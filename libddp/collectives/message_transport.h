#pragma once

// What moves point-to-point messages between this rank and some of the others: the pages of a host
// (shm_messages.h) or connections to other hosts (link_messages.h). The mailbox (mailbox.h) says
// which message belongs to which transfer, a transport only moves bytes.
//
// Words: *envelope* = what a sender posts: tag and size, small payloads inside; *unexpected
// message* = an envelope that the receiver has taken in and not matched yet; *ack* = what the
// receiver tells the sender: "send the chunks" (grant) or "done"; *chunk* = a part of a large
// message.
//
//   sender     not started --post--> started --ack: grant--> sends chunks --all taken--> done
//                                       `------ack: done--------------------------------> done
//   receiver   envelope --matched, accept--> grants, takes chunks  --all there--> done
//                                `--------> takes the bytes, posts "done" ------> done
//
// Thread rule: of the mailbox, one thread at a time.
//
//   class ShmMessages : public MessageTransport { ... };
//   Mailbox mailbox(comm, {&shm_messages, &link_messages});

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libddp/collectives/comm.h"

namespace libddp {

class Mailbox;

/// An envelope that no receive has asked for yet.
struct UnexpectedMessage {
  /// Of the group.
  int source = 0;
  /// Counts the messages of its channel.
  std::uint64_t number = 0;
  int tag = 0;
  std::uint64_t bytes = 0;
  /// Where the bytes are, in the words of the transport.
  std::uint64_t place = 0;
  /// Of a small message.
  std::vector<std::byte> payload{};
};

class MessageTransport {
 public:
  using Transfer = Comm::Transfer;

  virtual ~MessageTransport() = default;

  /// Whether messages to and from `rank` go this way.
  virtual bool reaches(int rank) const = 0;
  /// Lets go of transfers that the mailbox does not know any more: they may be gone.
  virtual void forget_missing(const Mailbox& mailbox) = 0;

  // A round moves what can move without waiting; true if anything did.
  /// Takes in envelopes, which go to the mailbox, acks, and the bytes that have come.
  virtual bool read(Mailbox& mailbox) = 0;
  /// The envelopes of a round come in the order of the transfers: a channel that is full stays full
  /// until the next one, as room that comes meanwhile must not go to a later message.
  virtual void begin_posting() = 0;
  /// Posts the envelope of a send; false where the channel is full.
  virtual bool post(Transfer& send) = 0;
  /// `receive` gets `message`, which has its size.
  virtual void accept(Transfer& receive, UnexpectedMessage& message) = 0;
  /// Sends acks and chunks.
  virtual bool write() = 0;

  /// After a call in which nothing moved: fails where a transfer waits for a peer that is lost.
  virtual void check(const std::vector<Transfer*>& /*transfers*/) {}
};

}  // namespace libddp
