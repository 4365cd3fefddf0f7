#pragma once

// The accepting side of the connections between hosts: lets in who proves that it belongs to this
// meeting (link_hello.h), and gives nobody else more than one small buffer for two seconds.
//
// Never waits for a stranger. At most 256 connections may be without proof; the oldest that has
// said nothing gives way, and who belongs here comes again. Running out of descriptors drops a
// stranger, not the meeting. One line a second at most is logged about them.
// Thread rule: one thread.
//
//   LinkDoor door(TcpListener::open("10.0.0.1"), own_rank, prover, is_expected);
//   poll(...);                                // with what add_polls gives
//   for (LinkGuest& guest : door.admit()) ...

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/transport/link_hello.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

/// Who has proved itself, and for which place.
struct LinkGuest {
  LinkPlace place;
  UniqueFd socket;
};

class LinkDoor {
 public:
  static constexpr std::size_t kMaxStrangers = 256;
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
  struct Stranger {
    UniqueFd socket;
    Deadline patience = Deadline::never();
    LinkHello hello{};
    LinkNonce nonce{};
    LinkProof proof{};
    std::size_t num_bytes = 0;
    bool is_challenged = false;
  };
  /// What a piece of reading came to.
  enum class Step { Waits, Over, Proved };

  void accept_some(std::vector<LinkGuest>& guests);
  void make_room();
  void welcome(Stranger& stranger, std::vector<LinkGuest>& guests);
  Step advance(Stranger& stranger);
  bool read_until(Stranger& stranger, char* data, std::size_t bytes, Step& step);
  Step check_hello(Stranger& stranger);
  Step check_proof(Stranger& stranger);
  Step refuse(Stranger& stranger, LinkRefusal refusal);
  void report(const std::string& reason);

  TcpListener listener_;
  const int own_rank_;
  const LinkProver prover_;
  const IsExpected is_expected_;
  std::deque<Stranger> strangers_;
  /// While there are no descriptors the listener is left alone for a moment.
  Deadline pause_ = Deadline::after(std::chrono::milliseconds(0));
  Deadline next_report_ = Deadline::after(std::chrono::milliseconds(0));
  long num_refused_ = 0;
};

}  // namespace libddp
