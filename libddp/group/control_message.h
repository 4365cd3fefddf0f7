#pragma once

// What ranks tell each other on the control sockets, beside the collectives: that they leave, that
// the group has failed and why, that they live, that one is in trouble, and where they are.
//
// A message is small and rare, so a socket's buffer always takes it whole; it is sent without
// waiting, and a peer that is gone is no error here (its own socket tells).
// Thread rule: send: one thread at a time per socket; ControlInbox: one thread.
//
//   send_control(socket, {.kind = ControlMessage::Kind::Goodbye, .sequence = 41});
//   for (const ControlMessage& message : inbox.take(socket)) ...

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/collectives/mesh.h"

namespace libddp {

struct ControlMessage {
  enum class Kind : std::uint8_t {
    Goodbye,
    Failure,
    /// The sender's process runs; to ranks of other hosts only.
    Heartbeat,
    /// The sender met an error and may not come to the next collectives.
    Trouble,
    /// It goes on all the same.
    TroubleOver,
    /// "Where are your threads?", and the answer.
    StacksWanted,
    Stacks,
  };
  static constexpr std::size_t kMaxText = 4000;

  Kind kind = Kind::Goodbye;
  /// Goodbye, Heartbeat, Trouble: the last collective that the sender has issued.
  std::uint64_t sequence = 0;
  /// Trouble: the how manieth after that collective. StacksWanted, Stacks: number of the question.
  std::uint64_t number = 0;
  /// Failure: what the sender's group failed of. Trouble, Stacks: the message alone.
  MeshFailure failure{};
};

/// False if the peer is gone.
bool send_control(int socket, const ControlMessage& message) noexcept;

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
