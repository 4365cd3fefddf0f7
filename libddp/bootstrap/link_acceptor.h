#pragma once

// The accepting side of the connections between hosts: lets in who proves that it belongs to this
// bootstrap (link_handshake.h), and gives nobody else more than one small buffer for two seconds.
// See pending_connections.h. Thread rule: one thread.
//
//   LinkAcceptor acceptor(TcpListener::open("10.0.0.1"), own_rank, prover, is_expected);
//   poll(...);                                // with what add_polls gives
//   for (AdmittedLink& admitted : acceptor.admit()) ...

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/link_handshake.h"
#include "libddp/bootstrap/pending_connections.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

/// Who has proved itself, and for which place.
struct AdmittedLink {
  LinkPlace place;
  UniqueFd socket;
};

class LinkAcceptor {
 public:
  static constexpr std::size_t kMostPending = PendingConnections<PendingConnection>::kMost;
  /// From accept to proof.
  static constexpr std::chrono::seconds kPatience{2};

  using IsExpected = std::function<bool(const LinkPlace&)>;

  LinkAcceptor(TcpListener listener, int own_rank, LinkProver prover, IsExpected is_expected);

  void add_polls(std::vector<pollfd>& entries) const;
  /// Takes in whoever has come, moves everybody on as far as their bytes allow.
  std::vector<AdmittedLink> admit();
  /// Takes in a connection that was accepted elsewhere.
  void take_in(UniqueFd socket, std::vector<AdmittedLink>& all_admitted);
  std::size_t num_pending() const { return pending_.size(); }

 private:
  struct Pending : PendingConnection {
    LinkRequest request{};
    LinkNonce nonce{};
    LinkProof proof{};
    std::size_t num_bytes = 0;
  };
  /// What a piece of reading came to.
  enum class Step { Waits, Over, Proved };

  void welcome(Pending& pending, std::vector<AdmittedLink>& all_admitted);
  Step advance(Pending& pending);
  bool read_until(Pending& pending, char* data, std::size_t bytes, Step& step);
  Step check_request(Pending& pending);
  Step check_proof(Pending& pending);
  Step refuse(Pending& pending, LinkRefusal refusal);

  TcpListener listener_;
  const int own_rank_;
  const LinkProver prover_;
  const IsExpected is_expected_;
  PendingConnections<Pending> pending_;
};

}  // namespace libddp
