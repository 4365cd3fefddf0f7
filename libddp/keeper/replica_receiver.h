#pragma once

// Receives one save of a rank from another host's keeper (replica_wire.h) into memory of its own.
//
// Nothing that comes is trusted: sizes are compared with the memory that is left before any is set
// aside, texts and checksums carry sums, and each chunk is checked as it comes. The slot is whole
// after the last of them. The save that the replica had before lies in its other slot, so that this
// may end at any byte. Thread rule: one thread, the only one that writes into replicas.
//
//   ReplicaReceiver receiver(stream, {.run = "job 7", .rank = 2, .generation = 1, .sequence = 12});
//   KeptReplicas::Replica replica = receiver.receive(replicas.find(2, 1), memory_limit);

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libddp/keeper/kept_replicas.h"
#include "libddp/keeper/replica_stream.h"
#include "libddp/keeper/replica_wire.h"
#include "libddp/slots/memory_limit.h"

namespace libddp {

class ReplicaReceiver {
 public:
  ReplicaReceiver(ReplicaStream& stream, ReplicaPlace place)
      : stream_(stream), place_(std::move(place)) {}

  /// `known`: what is there of that rank and generation, if something is; its older slot is used if
  /// nobody reads it. Throws SnapshotError, NetworkError, TimeoutError with a clause.
  KeptReplicas::Replica receive(const KeptReplicas::Replica& known,
                                const std::function<MemoryLimit()>& limit);

 private:
  void receive_opening(const std::function<MemoryLimit()>& limit);
  std::string receive_text(std::uint64_t bytes, std::uint32_t sum, const char* what);
  void receive_chunks(SlotMemory& memory, int slot);
  void check_head(const ReplicaHead& head) const;
  /// Whether it has the layout of the save that comes.
  bool fits(const SlotMemory& memory) const;

  ReplicaStream& stream_;
  const ReplicaPlace place_;
  ReplicaHead head_;
  PieceLayout layout_;
  std::string values_;
  std::vector<std::uint32_t> checksums_;
};

}  // namespace libddp
