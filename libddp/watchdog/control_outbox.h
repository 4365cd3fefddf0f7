#pragma once

// What one peer is to be told on its control socket and has not taken yet.
//
// Sending never waits. A message that the socket took in part is finished before anything else is
// sent, whatever that takes: a stream that lacks the rest would be garbage to a healthy peer.
// Behind it waits at most one message of each subject, the newest, since it says all that the older
// ones did: a peer that reads nothing for long costs no memory, and learns how things stand when it
// reads again. Thread rule: one thread at a time.
//
//   outbox.send(socket, {.kind = ControlMessage::Kind::Goodbye, .sequence = 41});
//   if (!outbox.is_empty()) ...                    // when the socket is writable: flush(socket)

#include <cstddef>
#include <deque>
#include <string>

#include "libddp/watchdog/control_message.h"

namespace libddp {

class ControlOutbox {
 public:
  /// False if the peer is gone: it will not get it.
  bool send(int socket, const ControlMessage& message) noexcept;
  /// Goes on with what waits, as far as the socket takes it.
  void flush(int socket) noexcept;
  bool is_empty() const { return waiting_.empty(); }

 private:
  struct Waiting {
    ControlMessage::Kind subject;
    std::string bytes;
  };

  bool is_begun() const { return num_sent_ > 0; }

  /// The first one may be sent in part.
  std::deque<Waiting> waiting_;
  std::size_t num_sent_ = 0;
  bool is_gone_ = false;
};

}  // namespace libddp
