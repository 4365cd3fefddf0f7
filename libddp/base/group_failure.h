#pragma once

// Why a group cannot come together, or cannot go on: what its ranks tell each other, and what every
// later call throws. Thread rule: a value; throw_failure is pure.
//
//   GroupFailure failure{GroupFailure::Kind::Peer, "rank 3 ended. Hint: ...", 3, 4711};
//   throw_failure(failure, where + ": " + failure.message);

#include <sys/types.h>

#include <string>

namespace libddp {

struct GroupFailure {
  /// Network: what lies between the hosts failed; the peer is at its other end.
  /// Device: an accelerator of this rank, or its library.
  enum class Kind { Peer, Timeout, Aborted, Network, Device };

  Kind kind = Kind::Peer;
  /// What happened, and the hint.
  std::string message;
  /// Who caused it; -1: this rank, or, of Kind::Peer, no single rank (two that call different
  /// things).
  int peer_rank = -1;
  pid_t peer_pid = 0;
};

/// What another rank's failure is to those that it tells of it: "rank 2 (pid 4711) gave up: ..."
/// where it is that rank's own doing (an abort, a timeout, a broken device), else the same. Who is
/// to blame stays, also at that rank itself, since the failure is passed on; where nobody is named,
/// it is the rank that did it. `teller`: its name, for the message.
GroupFailure told_by(const std::string& teller, int rank, pid_t pid, GroupFailure failure);

/// Throws PeerError, TimeoutError, NetworkError, DeviceError or StateError, with `message`.
[[noreturn]] void throw_failure(const GroupFailure& failure, const std::string& message);

}  // namespace libddp
