#pragma once

// For whom this rank has waited in collectives, and how long.
//
// Waits form chains: over several hosts a rank waits for a leader, which waited for a rank of its
// own host. So who was waited for says what it waited for itself, and only the rest is its own.
// Thread rule: one thread writes, any thread reads `total_ns`.
//
//   WaitLedger ledger(world_size);
//   ledger.add(2, 50'000'000, {.rank = 3, .ns = 40'000'000});  // 40 ms for rank 3, 10 for rank 2

#include <atomic>
#include <cstdint>
#include <vector>

namespace libddp {

/// A rank of the group that somebody waited for; no nanoseconds = nobody.
struct Delay {
  int rank = -1;
  std::int64_t ns = 0;
};

class WaitLedger {
 public:
  explicit WaitLedger(int num_ranks);

  /// This rank waited for `holder`, which says that it waited for `told` meanwhile.
  void add(int holder, std::int64_t ns, Delay told = {});
  /// By rank, since the beginning.
  std::int64_t total_ns(int rank) const;

  /// The longest wait since `forget`, as charged: what may delay this rank's part in what comes.
  Delay longest() const { return longest_; }
  void forget() { longest_ = {}; }

 private:
  void charge(Delay delay);

  std::vector<std::atomic<std::int64_t>> total_ns_;
  Delay longest_;
};

}  // namespace libddp
