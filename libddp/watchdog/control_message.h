#pragma once

// What ranks tell each other on the control sockets, beside the collectives: that they leave, that
// the group has failed and why, that they live, that one has met an error, and where they are.
//
// A message is small, but a peer that is stopped, or that the network does not reach, takes
// nothing: control_outbox.h keeps what its socket did not take. Thread rule: values; ControlInbox:
// one thread.
//
//   outbox.send(socket, {.kind = ControlMessage::Kind::Goodbye, .sequence = 41});
//   for (const ControlMessage& message : inbox.take(socket)) ...

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/collectives/comm.h"

namespace libddp {

struct ControlMessage {
  enum class Kind : std::uint8_t {
    Goodbye,
    Failure,
    /// The sender's process runs; to ranks of other hosts only.
    Heartbeat,
    /// The sender met an error and may not come to the next collectives.
    Report,
    /// It goes on all the same.
    Retraction,
    /// "Where are your threads?", and the answer.
    StacksWanted,
    Stacks,
    /// The sender's group was destroyed without a shutdown; its process goes on.
    Dropped,
    /// It will say goodbye, but waits for messages.
    Leaving,
    /// What the sender has called on its device (call_chain.h).
    Calls,
  };
  static constexpr std::size_t kMaxText = 4000;

  Kind kind = Kind::Goodbye;
  /// Goodbye, Heartbeat, Report, Calls: the last collective that the sender has issued.
  std::uint64_t sequence = 0;
  /// Report: its number among those after that collective. StacksWanted, Stacks: number of the
  /// question. Leaving: bits of a Departure. Calls: their chain.
  std::uint64_t number = 0;
  /// Failure: what the sender's group failed of. Report, Stacks, Calls: the message alone.
  GroupFailure failure{};

  /// As it travels; a text that is too long is cut.
  std::string encode() const;
};

/// Puts the bytes of one socket together.
class ControlInbox {
 public:
  /// Messages that have come; does not wait.
  std::vector<ControlMessage> take(int socket);
  /// The peer closed its end: nothing will come any more.
  bool is_closed() const { return is_closed_; }
  /// What came was no message; the connection must not be read any more.
  bool is_garbled() const { return is_garbled_; }

 private:
  void receive(int socket);

  std::string bytes_;
  bool is_closed_ = false;
  bool is_garbled_ = false;
};

}  // namespace libddp
