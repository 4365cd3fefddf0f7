#pragma once

// All memories that a keeper holds: those of its own host's ranks, which processes write, and
// replicas of those of other hosts, which its puller writes. Thread rule: any thread.
//
//   memories.put(SlotMemory::open(std::move(fd)));
//   HeldSave save = memories.lend({.run = "job 7", .rank = 0, .generation = 1, .sequence = 12});

#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "libddp/keeper/held_save.h"
#include "libddp/keeper/kept_memories.h"
#include "libddp/keeper/kept_replicas.h"
#include "libddp/keeper/replica_wire.h"

namespace libddp {

class HostMemories {
 public:
  using Memory = KeptMemories::Memory;

  /// Of this host.
  void put(SlotMemory memory);
  /// What the puller has fetched.
  void put_replica(KeptReplicas::Replica replica) { replicas_.put(std::move(replica)); }
  /// Makes a replica one of this host's own. REQUIRES that there is one.
  void adopt(int rank, std::uint64_t generation);
  void forget_old();
  /// Of this host: a rank that has come to its end needs none.
  void forget_rank(int rank);
  /// Of this host: nobody writes the rank's memories any more, whatever its process had reserved.
  void unreserve(int rank);

  /// Whether it is, by another descriptor, one that is here: then there may be readers.
  bool is_known(const SlotMemory& memory) const;
  /// Of this host; null, if there is none.
  Memory find(int rank, std::uint64_t generation) const;
  std::vector<Memory> own() const;
  const KeptReplicas& replicas() const { return replicas_; }
  bool is_empty() const;
  /// Of this host: KeptMemories.
  std::optional<KeptMemories::Common> newest_common() const;
  void note_complete(std::uint64_t sequence);
  std::set<std::uint64_t> complete() const;

  /// A save for another host, held. Nothing while its writer has reserved the slot: it may
  /// overwrite it or not. Throws SnapshotError that says what is here instead.
  HeldSave lend(const ReplicaPlace& place) const;
  enum class Whose { Nobody, Own, Replica };
  /// Where that save is.
  Whose where(int rank, std::uint64_t generation, std::uint64_t sequence) const;
  /// Whether a save in that memory of the rank from `sequence` on is here.
  bool has_since(int rank, std::uint64_t generation, std::uint64_t sequence) const;

 private:
  /// Where a save of that memory is whose sequence `fits`.
  template <typename Fits>
  Whose find_save(int rank, std::uint64_t generation, Fits fits) const;

  mutable std::mutex mutex_;
  KeptMemories own_;
  KeptReplicas replicas_;
};

/// What a slot of a replica holds, while nobody writes it.
std::optional<SavedStep> saved_in_replica(const KeptReplicas::Memory& memory, int slot);

}  // namespace libddp
