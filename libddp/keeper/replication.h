#pragma once

// A keeper's part in copies between hosts: with a key it gives saves (ReplicaSender) and fetches
// them (ReplicaPuller); without one it does neither, and has no thread for it.
// Thread rule: one thread; what is given to the constructor is called in others.
//
//   Replication replication({.run = "job 7"}, replicas, find, arrived, changed);
//   const std::string address = replication.listen("10.0.0.1", key);
//   replication.pull({.from = endpoint, .rank = 2, .generation = 1, .sequence = 12});

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "libddp/bootstrap/run_key.h"
#include "libddp/keeper/kept_replicas.h"
#include "libddp/keeper/replica_puller.h"
#include "libddp/keeper/replica_sender.h"

namespace libddp {

class Replication {
 public:
  struct Options {
    std::string run;
    std::uint64_t bytes_per_second = 0;
    std::chrono::milliseconds patience{10'000};
    std::chrono::milliseconds next_pause{5'000};
    std::function<MemoryLimit()> memory_limit = libddp::memory_limit;
  };

  Replication(Options options, const KeptReplicas& replicas, ReplicaSender::Find find,
              ReplicaPuller::Arrived arrived, std::function<void()> changed);

  /// Listens, once. `where`: a numeric address, a name of an interface, or nothing: the interface
  /// that other hosts use. Returns "address:port". Throws SnapshotError if it listens elsewhere or
  /// with another key.
  std::string listen(const std::string& where, std::shared_ptr<const RunKey> key);
  /// Throws SnapshotError before listen().
  void pull(ReplicaPuller::Job job);
  ReplicaPuller::State state(int rank) const;
  bool is_coming(int rank, std::uint64_t generation, std::uint64_t sequence) const;
  /// Empty before listen().
  std::string address() const;

 private:
  const Options options_;
  const KeptReplicas& replicas_;
  const ReplicaSender::Find find_;
  const ReplicaPuller::Arrived arrived_;
  const std::function<void()> changed_;
  std::shared_ptr<const RunKey> key_;
  std::string where_;
  std::optional<ReplicaSender> sender_;
  std::optional<ReplicaPuller> puller_;
};

}  // namespace libddp
