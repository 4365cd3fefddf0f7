#pragma once

// The accepting side of the connections between hosts: lets in who proves that it belongs to this
// meeting (link_hello.h), and gives nobody else more than one small buffer for two seconds. See
// strangers.h.
// Thread rule: one thread.
//
//   LinkDoor door(TcpListener::open("10.0.0.1"), own_rank, prover, is_expected);
//   poll(...);                                // with what add_polls gives
//   for (LinkGuest& guest : door.admit()) ...

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/link_hello.h"
#include "libddp/bootstrap/strangers.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

/// Who has proved itself, and for which place.
struct LinkGuest {
  LinkPlace place;
  UniqueFd socket;
};

class LinkDoor {
 public:
  static constexpr std::size_t kMostStrangers = Strangers<StrangerBase>::kMost;
  /// From accept to proof.
  static constexpr std::chrono::seconds kPatience{2};

  using IsExpected = std::function<bool(const LinkPlace&)>;

  LinkDoor(TcpListener listener, int own_rank, LinkProver prover, IsExpected is_expected);

  void add_polls(std::vector<pollfd>& entries) const;
  /// Takes in whoever has come, moves everybody on as far as their bytes allow.
  std::vector<LinkGuest> admit();
  /// Takes in a connection that was accepted elsewhere.
  void take_in(UniqueFd socket, std::vector<LinkGuest>& guests);
  std::size_t num_strangers() const { return strangers_.size(); }

 private:
  struct Stranger : StrangerBase {
    LinkHello hello{};
    LinkNonce nonce{};
    LinkProof proof{};
    std::size_t num_bytes = 0;
  };
  /// What a piece of reading came to.
  enum class Step { Waits, Over, Proved };

  void welcome(Stranger& stranger, std::vector<LinkGuest>& guests);
  Step advance(Stranger& stranger);
  bool read_until(Stranger& stranger, char* data, std::size_t bytes, Step& step);
  Step check_hello(Stranger& stranger);
  Step check_proof(Stranger& stranger);
  Step refuse(Stranger& stranger, LinkRefusal refusal);

  TcpListener listener_;
  const int own_rank_;
  const LinkProver prover_;
  const IsExpected is_expected_;
  Strangers<Stranger> strangers_;
};

}  // namespace libddp
