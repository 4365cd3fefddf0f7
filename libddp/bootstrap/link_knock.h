#pragma once

// The connecting side of one connection between hosts (link_hello.h). Used by link_meeting.cpp.
//
// Never waits after the connection is made. A door in a crowd may drop who is slow, so a connection
// that is closed before it was answered is made again after a moment.
// Thread rule: one thread.
//
//   LinkKnock knock({rank, LinkKind::Control, 0}, own_rank, endpoint);
//   knock.connect(deadline);
//   while (!knock.advance(prover)) poll(...);    // knock.socket() is readable
//   UniqueFd link = knock.take();

#include <chrono>
#include <cstddef>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/link_hello.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

class LinkKnock {
 public:
  LinkKnock(const LinkPlace& place, int own_rank, const TcpEndpoint& door)
      : place_(place), own_rank_(own_rank), door_(door) {}

  const LinkPlace& place() const { return place_; }
  int socket() const { return socket_.get(); }

  /// Connects, anew if there was a connection, and says hello. Throws NetworkError, TimeoutError.
  void connect(Deadline deadline);
  /// As connect, over a connection that is there.
  void greet(UniqueFd socket, Deadline deadline);
  /// The door closed the connection without an answer, and it is time to try again.
  bool wants_to_connect() const { return !socket_ && pause_.expired(); }
  bool was_dropped() const { return num_connects_ > 1; }
  /// This rank has shown its proof: the other may be through with its part from now on.
  bool has_proved() const { return has_proved_; }

  /// Moves on as far as the bytes allow; true when both sides are proved. Throws NetworkError when
  /// refused, or when the other side does not prove itself.
  bool advance(const LinkProver& prover);
  UniqueFd take() { return std::move(socket_); }

 private:
  bool read_reply();
  void drop();

  LinkPlace place_;
  int own_rank_;
  TcpEndpoint door_;
  UniqueFd socket_;
  LinkHello hello_{};
  LinkReply reply_{};
  LinkNonce nonce_{};
  std::size_t num_bytes_ = 0;
  bool has_proved_ = false;
  int num_connects_ = 0;
  Deadline pause_ = Deadline::never();
};

}  // namespace libddp
