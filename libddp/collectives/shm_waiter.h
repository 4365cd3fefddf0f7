#pragma once

// How a rank waits for the others of its host in a collective: it looks, spins while there are free
// cores, then sleeps in growing pieces, between which it looks at everything that can end the wait
// (a failure, the deadline, an interrupt of the interpreter).
//
// Thread rule: of the collectives, one thread; the ledger's totals any.
//
//   ShmWaiter waiter(peers, failure);
//   if (!condition.ready()) waiter.wait(call, peers.page(0).event(), condition);

#include <cstdint>
#include <vector>

#include "libddp/collectives/shm_failure.h"
#include "libddp/collectives/shm_page.h"
#include "libddp/collectives/shm_peers.h"
#include "libddp/collectives/wait_ledger.h"
#include "libddp/collectives/wait_policy.h"

namespace libddp {

/// Something that a rank can wait for.
class WaitCondition {
 public:
  virtual ~WaitCondition() = default;
  virtual bool ready() = 0;
  /// Ranks that hold the wait up, for the message of a timeout; empty = any rank.
  virtual std::vector<int> missing() const = 0;
  /// A rank that `ready` has found missing, for statistics; -1 = none in particular.
  virtual int blocker() const { return -1; }
  /// Throws if it is already clear that waiting is in vain; called once the wait lasts.
  virtual void check() {}
};

class ShmWaiter {
 public:
  ShmWaiter(const ShmPeers& peers, ShmFailure& failure);

  const WaitPolicy& policy() const { return policy_; }
  /// The long waits of this rank, by ranks of the group.
  WaitLedger& ledger() { return ledger_; }
  const WaitLedger& ledger() const { return ledger_; }

  /// A collective begins; `is_last_stage`: that part of one over several hosts which follows the
  /// network.
  void begin(bool is_last_stage);
  /// Sleeps by the policy until `condition` is ready; REQUIRES that it was not just now.
  /// Errors: as Comm. Any exception out of it has poisoned the communicator.
  void wait(const CommCall& call, FutexEvent& event, WaitCondition& condition);

 private:
  void settle(const CommCall& call, FutexEvent& event, WaitCondition& condition);
  void count_wait(int blocker, std::int64_t ns);
  [[noreturn]] void give_up(const CommCall& call, const WaitCondition& condition, double seconds);

  const ShmPeers& peers_;
  ShmFailure& failure_;
  const WaitPolicy policy_;
  WaitLedger ledger_;
  bool is_last_stage_ = false;
};

}  // namespace libddp
