#pragma once

// Fetches saves of ranks from keepers of other hosts in the background: one thread of the keeper,
// in the order of the requests, one connection each. A rank whose newer save is asked for skips its
// older one; copies that are to come next (PullPurpose) skip each other only, and wait.
//
// A peer that does nothing for `patience` is given up, with everything else that waits for it. A
// failure is logged once and kept for whoever asks; what was there before stays.
// Thread rule: any thread; `arrived` and `changed` are called in the puller's.
//
//   ReplicaPuller puller(key, replicas, arrived, changed, {.run = "job 7"});
//   puller.add({.from = endpoint, .rank = 2, .generation = 1, .sequence = 12});
//   puller.state(2).error;

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "libddp/base/event_fd.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/link_handshake.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/keeper/kept_replicas.h"
#include "libddp/keeper/pull.h"
#include "libddp/slots/memory_limit.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

class ReplicaPuller {
 public:
  struct Options {
    std::string run;
    std::chrono::milliseconds patience{10'000};
    std::function<MemoryLimit()> memory_limit = libddp::memory_limit;
    /// After so long without a newer one a NextReplica is fetched.
    std::chrono::milliseconds next_pause{5'000};
  };
  struct Job {
    bool is_of(int of_rank, std::uint64_t of_generation, std::uint64_t of_sequence) const {
      return rank == of_rank && generation == of_generation && sequence == of_sequence;
    }

    TcpEndpoint from;
    int rank = 0;
    std::uint64_t generation = 0;
    std::uint64_t sequence = 0;
    PullPurpose purpose = PullPurpose::Replica;
  };
  /// Of a rank.
  struct State {
    /// Of the newest that was asked for; empty if it did not fail.
    std::string error;
    /// Jobs that are not done.
    int num_waiting = 0;
  };
  /// Takes a save that is whole; throws Error if it cannot be kept.
  using Arrived = std::function<void(KeptReplicas::Replica, const Job&)>;

  /// `key`: of both keepers, for this purpose only. Throws SnapshotError from add() if too many
  /// ranks wait.
  ReplicaPuller(std::shared_ptr<const RunKey> key, const KeptReplicas& replicas, Arrived arrived,
                std::function<void()> changed, Options options);
  /// Gives up the job in progress and drops the others.
  ~ReplicaPuller();

  void add(Job job);
  State state(int rank) const;
  /// Whether that save is being fetched, or will be.
  bool is_coming(int rank, std::uint64_t generation, std::uint64_t sequence) const;

 private:
  struct Waiting {
    Job job;
    std::chrono::steady_clock::time_point not_before;
  };

  void run();
  /// The first whose time has come; waits for it. Nothing at the end.
  std::optional<Job> next();
  void pull(const Job& job);
  UniqueFd connect(const TcpEndpoint& from);
  void finish(const Job& job, const std::string& error, bool may_log = true);
  void give_up_on(const TcpEndpoint& from, const std::string& reason);

  const LinkProver prover_;
  const KeptReplicas& replicas_;
  const Arrived arrived_;
  const std::function<void()> changed_;
  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Waiting> jobs_;
  /// In progress.
  std::optional<Job> current_;
  std::map<int, State> states_;
  bool is_stopping_ = false;
  EventFd stop_ = EventFd::create();
  std::thread thread_;
};

}  // namespace libddp
