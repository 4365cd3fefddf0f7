#pragma once

// The connecting side of one connection between hosts (link_handshake.h). Used by
// link_bootstrap.cpp.
//
// Never waits after the connection is made. A listener in a crowd may drop who is slow, so a
// connection that is closed before it was answered is made again after a moment. Thread rule: one
// thread.
//
//   LinkConnector connector({rank, LinkKind::Control, 0}, own_rank, endpoint);
//   connector.connect(deadline);
//   while (!connector.advance(prover)) poll(...);    // connector.socket() is readable
//   UniqueFd link = connector.take();

#include <chrono>
#include <cstddef>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/link_handshake.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

class LinkConnector {
 public:
  LinkConnector(const LinkPlace& place, int own_rank, const TcpEndpoint& endpoint)
      : place_(place), own_rank_(own_rank), endpoint_(endpoint) {}

  const LinkPlace& place() const { return place_; }
  int socket() const { return socket_.get(); }

  /// Connects, anew if there was a connection, and sends its request. Throws NetworkError,
  /// TimeoutError.
  void connect(Deadline deadline);
  /// As connect, over a connection that is there.
  void greet(UniqueFd socket, Deadline deadline);
  /// The other side closed the connection without an answer, and it is time to try again.
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
  TcpEndpoint endpoint_;
  UniqueFd socket_;
  LinkRequest request_{};
  LinkReply reply_{};
  LinkNonce nonce_{};
  std::size_t num_bytes_ = 0;
  bool has_proved_ = false;
  int num_connects_ = 0;
  Deadline pause_ = Deadline::never();
};

}  // namespace libddp
