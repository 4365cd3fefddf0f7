#include "libddp/keeper/replica_puller.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/service_thread.h"
#include "libddp/bootstrap/link_connector.h"
#include "libddp/keeper/replica_receiver.h"
#include "libddp/keeper/replica_sender.h"
#include "libddp/keeper/replica_stream.h"

namespace libddp {
namespace {

using std::chrono_literals::operator""s;

/// Ranks of one host, and more.
constexpr std::size_t kMostJobs = 1024;
/// A listener in a crowd may drop who is slow; then it is tried again after so long.
constexpr std::chrono::milliseconds kHandshakePause{50};

std::string told(const ReplicaPuller::Job& job, const std::string& reason) {
  return fmt::format("libddp snapshot: rank {} could not be pulled from {}: {}.", job.rank,
                     job.from.to_string(), reason);
}

}  // namespace

ReplicaPuller::ReplicaPuller(std::shared_ptr<const RunKey> key, const KeptReplicas& replicas,
                             Arrived arrived, std::function<void()> changed, Options options)
    : prover_(std::move(key), {}),
      replicas_(replicas),
      arrived_(std::move(arrived)),
      changed_(std::move(changed)),
      options_(std::move(options)) {
  thread_ = start_service_thread("libddp-pull", [this] { run(); });
}

ReplicaPuller::~ReplicaPuller() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  stop_.set();
  wake_.notify_all();
  thread_.join();
}

void ReplicaPuller::add(Job job) {
  {
    const std::lock_guard lock(mutex_);
    const bool is_copy = job.purpose != PullPurpose::Own;
    // It would take the place of the copy before it.
    if (is_copy && current_ && current_->purpose != PullPurpose::Own &&
        current_->is_of(job.rank, job.generation, job.sequence)) {
      return;
    }
    const bool is_next = job.purpose == PullPurpose::NextReplica;
    std::erase_if(jobs_, [&](const Waiting& other) {
      if (other.job.rank != job.rank) return false;
      if (is_next && other.job.purpose != PullPurpose::NextReplica) return false;
      --states_[job.rank].num_waiting;
      return true;
    });
    if (jobs_.size() == kMostJobs) {
      throw SnapshotError("libddp snapshot: the saves of too many ranks are to be pulled at once.");
    }
    ++states_[job.rank].num_waiting;
    const auto now = std::chrono::steady_clock::now();
    jobs_.push_back(
        {.job = std::move(job), .not_before = is_next ? now + options_.next_pause : now});
  }
  wake_.notify_all();
}

ReplicaPuller::State ReplicaPuller::state(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = states_.find(rank);
  return found == states_.end() ? State{} : found->second;
}

bool ReplicaPuller::is_coming(int rank, std::uint64_t generation, std::uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  return (current_ && current_->is_of(rank, generation, sequence)) ||
         std::any_of(jobs_.begin(), jobs_.end(), [&](const Waiting& waiting) {
           return waiting.job.is_of(rank, generation, sequence);
         });
}

std::optional<ReplicaPuller::Job> ReplicaPuller::next() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    const auto first = std::min_element(
        jobs_.begin(), jobs_.end(),
        [](const Waiting& one, const Waiting& other) { return one.not_before < other.not_before; });
    if (first == jobs_.end()) {
      wake_.wait(lock);
    } else if (const auto left = first->not_before - std::chrono::steady_clock::now(); left > 0s) {
      wake_.wait_for(lock, left);
    } else {
      current_ = std::move(first->job);
      jobs_.erase(first);
      return current_;
    }
  }
  return std::nullopt;
}

void ReplicaPuller::run() {
  while (const std::optional<Job> job = next()) {
    try {
      pull(*job);
      finish(*job, "");
    } catch (const TimeoutError& error) {
      finish(*job, told(*job, error.what()));
      give_up_on(job->from, error.what());
    } catch (const std::exception& error) {
      finish(*job, told(*job, error.what()));
    }
  }
}

void ReplicaPuller::pull(const Job& job) {
  ReplicaStream stream(connect(job.from), stop_.fd(), options_.patience);
  ReplicaReceiver receiver(stream, {.run = options_.run,
                                    .rank = job.rank,
                                    .generation = job.generation,
                                    .sequence = job.sequence});
  // Memory that is to be this host's own will have a writer of its own.
  const auto known = job.purpose == PullPurpose::Own ? KeptReplicas::Replica{}
                                                     : replicas_.find(job.rank, job.generation);
  arrived_(receiver.receive(known, options_.memory_limit), job);
}

UniqueFd ReplicaPuller::connect(const TcpEndpoint& from) {
  LinkConnector connector(replica_link_place(), replica_link_place().rank, from);
  const Deadline deadline = Deadline::after(options_.patience);
  connector.connect(deadline);
  while (!connector.advance(prover_)) {
    if (deadline.expired()) throw TimeoutError("it did not answer in time");
    if (connector.wants_to_connect()) connector.connect(deadline);
    wait_unless_stopped(connector.socket(), POLLIN, stop_.fd(), kHandshakePause);
  }
  return connector.take();
}

void ReplicaPuller::give_up_on(const TcpEndpoint& from, const std::string& reason) {
  std::vector<Job> given_up;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(jobs_, [&](const Waiting& waiting) {
      if (waiting.job.from.to_string() != from.to_string()) return false;
      given_up.push_back(waiting.job);
      return true;
    });
  }
  // It is in the log already.
  for (const Job& job : given_up) finish(job, told(job, reason), false);
}

void ReplicaPuller::finish(const Job& job, const std::string& error, bool may_log) {
  {
    const std::lock_guard lock(mutex_);
    State& state = states_[job.rank];
    --state.num_waiting;
    if (!error.empty() && state.error != error && !is_stopping_ && may_log) {
      log(LogLevel::Warn, "replica_not_pulled", {{"rank", job.rank}, {"reason", error}});
    }
    state.error = error;
    current_.reset();
  }
  changed_();
}

}  // namespace libddp
