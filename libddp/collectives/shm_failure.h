#pragma once

// The failure of a communicator of one host: the first one is kept, shown to the peers in this
// rank's page, taken over from theirs, and thrown by every later call.
//
// Thread rule: any thread.
//
//   failure.fail({.kind = GroupFailure::Kind::Aborted, .message = "enough"});   // wakes everyone
//   failure.throw_if_failed(&call);

#include <cstddef>
#include <cstdint>
#include <string>

#include "libddp/collectives/failure_latch.h"
#include "libddp/collectives/shm_peers.h"

namespace libddp {

class ShmFailure {
 public:
  explicit ShmFailure(const ShmPeers& peers) : peers_(peers) {}

  /// Keeps the first failure, shows it to the peers, wakes everyone.
  void fail(GroupFailure failure) noexcept;
  /// Null while there is none.
  const GroupFailure* get() const noexcept { return latch_.get(); }
  /// One load, for hot paths; does not look at the peers.
  bool is_set() const noexcept { return latch_.is_set(); }
  /// As throw_if_failed, but only tells.
  bool has_failed();
  /// Whether `rank` has shown a failure of its own.
  bool has_failed_at(int rank) const;
  /// Throws the kept failure, also one that a peer has shown; `call` is what it interrupts.
  void throw_if_failed(const CommCall* call);
  /// Throws the kept failure where there is one, as that of a call that comes later.
  void throw_if_earlier(const CommCall& call) const {
    if (latch_.is_set()) throw_kept(&call, true);
  }
  /// `fail`, then throws it as the error of `call` (null: of no call in particular).
  [[noreturn]] void fail_and_throw(const CommCall* call, GroupFailure failure);

  /// Memory of `rank`'s arena as mapped here. Throws PeerError if the range is not in it; `call` is
  /// for the message.
  std::byte* reach(const CommCall* call, int rank, std::uint64_t offset, std::uint64_t bytes);

 private:
  void adopt_failure_of_peer();
  void show(const GroupFailure& failure) noexcept;
  [[noreturn]] void throw_kept(const CommCall* call, bool is_earlier) const;

  const ShmPeers& peers_;
  FailureLatch latch_;
};

}  // namespace libddp
