#include "libddp/keeper/replica_puller.h"

#include <fmt/format.h>
#include <poll.h>

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
    std::erase_if(jobs_, [&](const Job& other) {
      if (other.rank != job.rank) return false;
      --states_[job.rank].num_waiting;
      return true;
    });
    if (jobs_.size() == kMostJobs) {
      throw SnapshotError("libddp snapshot: the saves of too many ranks are to be pulled at once.");
    }
    ++states_[job.rank].num_waiting;
    jobs_.push_back(std::move(job));
  }
  wake_.notify_all();
}

ReplicaPuller::State ReplicaPuller::state(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = states_.find(rank);
  return found == states_.end() ? State{} : found->second;
}

void ReplicaPuller::run() {
  while (true) {
    std::optional<Job> job;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return is_stopping_ || !jobs_.empty(); });
      if (is_stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
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
  const auto known =
      job.is_replica ? replicas_.find(job.rank, job.generation) : KeptReplicas::Replica{};
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
    std::erase_if(jobs_, [&](const Job& job) {
      if (job.from.to_string() != from.to_string()) return false;
      given_up.push_back(job);
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
  }
  changed_();
}

}  // namespace libddp
