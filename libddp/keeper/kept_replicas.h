#pragma once

// Copies that a keeper holds of the memories of ranks of other hosts. Of each rank there is one per
// layout (generation), always with a save that is whole; those of an older layout go when all their
// ranks have one of a newer, and at the latest with the second newer one.
// Thread rule: any thread; the puller's alone writes into them.
//
//   replicas.put({.memory = memory, .newest_slot = 0});
//   for (const auto& memory : replicas.all()) pass_on(memory->fd());

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "libddp/slots/slot_memory.h"

namespace libddp {

class KeptReplicas {
 public:
  using Memory = std::shared_ptr<SlotMemory>;

  struct Replica {
    Memory memory;
    /// Which was filled last; the other one is next.
    int newest_slot = 0;
    /// The other one has been filled, too: its pages are there.
    bool has_both = false;
  };

  /// In place of one of the same rank and generation. REQUIRES that its newest slot is whole.
  void put(Replica replica);
  /// Null, if there is none.
  Replica find(int rank, std::uint64_t generation) const;
  void drop(int rank, std::uint64_t generation);
  /// Those of older layouts than this: no host has the rest of their saves.
  void forget_before(std::uint64_t generation);
  /// Older generations first, by rank.
  std::vector<Memory> all() const;
  bool is_empty() const;

 private:
  using ByRank = std::map<int, Replica>;

  /// REQUIRES the mutex.
  void forget_old();
  static bool has_all_of(const ByRank& newer, const ByRank& older);

  mutable std::mutex mutex_;
  std::map<std::uint64_t, ByRank> generations_;
};

}  // namespace libddp
