#include "libddp/keeper/persister.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/service_thread.h"
#include "libddp/slots/slot.h"

namespace libddp {
namespace {

/// Between two looks for the parts of other hosts.
constexpr std::chrono::milliseconds kPause{50};
/// The same where each look is a request to a service.
constexpr std::chrono::milliseconds kAddressPause{1'000};

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

/// The writer of its slot, until the job is done; where it is in there already, the job finds
/// another save than its own.
void keep_away(Persister::Job& job) {
  Slot& slot = job.memory->slot(job.slot);
  if (job.hold || !slot.try_hold()) return;
  job.hold = {&slot, [memory = job.memory](void* held) { static_cast<Slot*>(held)->release(); }};
}

/// Tells of each chunk that is taken.
class WatchedSource final : public ChunkSource {
 public:
  WatchedSource(const ChunkSource& source, const std::function<void()>& taken)
      : source_(source), taken_(taken) {}

  const PieceLayout& layout() const override { return source_.layout(); }
  std::uint32_t checksum(std::size_t index) const override { return source_.checksum(index); }
  std::span<const std::byte> chunk(std::size_t index,
                                   std::vector<std::byte>& scratch) const override {
    taken_();
    return source_.chunk(index, scratch);
  }
  bool stays() const override { return source_.stays(); }
  std::string name() const override { return source_.name(); }

 private:
  const ChunkSource& source_;
  const std::function<void()> taken_;
};

}  // namespace

Persister::Persister(std::function<void()> changed) : changed_(std::move(changed)) {
  thread_ = start_service_thread("libddp-persist", [this] { run(); });
}

Persister::~Persister() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  opened_.abandon();
  wake_.notify_all();
  thread_.join();
}

void Persister::add(Job job) {
  const int rank = job.memory->identity().rank;
  {
    const std::lock_guard lock(mutex_);
    if (job.saved == current_) keep_away(job);
    std::erase_if(jobs_, [&](const Job& other) {
      if (other.memory->identity().rank != rank || other.saved == current_) return false;
      --states_[rank].num_waiting;
      return true;
    });
    ++states_[rank].num_waiting;
    jobs_.push_back(std::move(job));
  }
  wake_.notify_all();
}

Persister::State Persister::state(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = states_.find(rank);
  return found == states_.end() ? State{} : found->second;
}

bool Persister::is_idle() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(states_.begin(), states_.end(),
                     [](const auto& entry) { return entry.second.num_waiting == 0; });
}

bool Persister::is_moving(std::chrono::milliseconds patience) const {
  const std::lock_guard lock(mutex_);
  if (jobs_.empty() && !is_storing_ && !is_awaiting_) return false;
  const std::chrono::steady_clock::duration moved{moved_.load()};
  return std::chrono::steady_clock::now().time_since_epoch() - moved < patience;
}

void Persister::run() {
  give_way();
  while (true) {
    std::optional<Job> job;
    {
      std::unique_lock lock(mutex_);
      const auto is_due = [&] { return is_stopping_ || !jobs_.empty(); };
      if (commits_.empty()) {
        wake_.wait(lock, is_due);
      } else {
        wake_.wait_for(lock, is_awaiting_ ? kAddressPause : kPause, is_due);
      }
      if (is_stopping_) return;
      if (!jobs_.empty()) {
        job = take();
        is_storing_ = true;
      }
    }
    if (job) {
      note_move();
      store(std::move(*job));
      note_move();
    }
    commit_what_is_there();
    const std::lock_guard lock(mutex_);
    is_storing_ = false;
    is_awaiting_ = std::any_of(commits_.begin(), commits_.end(), [](const Commit& commit) {
      return !commit.storage.helper.program.empty();
    });
  }
}

Persister::Job Persister::take() {
  const auto of_current = std::find_if(jobs_.begin(), jobs_.end(),
                                       [&](const Job& each) { return each.saved == current_; });
  const auto next = of_current == jobs_.end() ? jobs_.begin() : of_current;
  Job job = std::move(*next);
  jobs_.erase(next);
  if (job.saved != current_) {
    current_ = job.saved;
    for (Job& other : jobs_) {
      if (other.saved == current_) keep_away(other);
    }
  }
  return job;
}

void Persister::store(Job job) {
  const int rank = job.memory->identity().rank;
  Slot& slot = job.memory->slot(job.slot);
  const bool is_held = hold(job);
  // Whoever is told of the end finds the slot free.
  job.hold.reset();
  if (!is_held || is_known(job) || slot.whole() != job.saved) {
    // Its writer may have needed the place: a newer save is stored instead, whose request comes.
    if (is_held) slot.release();
    finish_superseded(rank);
    return;
  }
  std::string error;
  try {
    const SlotSource source(*job.memory, job.slot);
    opened_.open(job.storage)
        ->add_rank(job.saved, job.storage.start, rank, job.memory->identity().world_size,
                   WatchedSource(source, [this] { note_move(); }), slot.values());
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  slot.release();
  if (job.storage.commits) {
    await_commit(job, error);
  } else {
    finish(rank, job.saved, error);
  }
}

bool Persister::hold(const Job& job) {
  Slot& slot = job.memory->slot(job.slot);
  while (!slot.try_hold()) {
    // Its writer may take another one.
    if (slot.whole() != job.saved) return false;
    std::unique_lock lock(mutex_);
    if (wake_.wait_for(lock, Slot::kReservedPause, [&] { return is_stopping_; })) return false;
  }
  return true;
}

bool Persister::is_known(const Job& job) const {
  const int rank = job.memory->identity().rank;
  const bool is_waiting = std::any_of(commits_.begin(), commits_.end(), [&](const Commit& commit) {
    return commit.saved == job.saved && commit.storage.start == job.storage.start &&
           contains(commit.ranks, rank);
  });
  return is_waiting || state(rank).stored == job.saved;
}

void Persister::await_commit(const Job& job, const std::string& error) {
  const int rank = job.memory->identity().rank;
  const auto is_same = [&](const Commit& commit) {
    return commit.saved == job.saved && commit.storage.start == job.storage.start;
  };
  // Asked for once more: what was in the way may be gone.
  if (is_same(failed_) && contains(failed_.ranks, rank)) failed_ = {};
  auto commit = std::find_if(commits_.begin(), commits_.end(), is_same);
  if (commit == commits_.end()) {
    commit = commits_.insert(commits_.end(), {.saved = job.saved,
                                              .storage = job.storage,
                                              .world_size = job.memory->identity().world_size,
                                              .ranks = {},
                                              .error = is_same(failed_) ? failed_.error : ""});
  }
  commit->ranks.push_back(rank);
  if (commit->error.empty()) commit->error = error;
}

void Persister::commit_what_is_there() {
  std::uint64_t newest = 0;
  for (Commit& commit : commits_) {
    if (!commit.error.empty()) {
      note_failure(commit);
      continue;
    }
    try {
      const auto store = opened_.open(commit.storage);
      const auto missing =
          store->missing_ranks(commit.saved, commit.storage.start, commit.world_size);
      if (!missing.empty()) continue;
      store->commit(commit.saved, commit.storage.start, commit.world_size);
      newest = std::max(newest, commit.saved.sequence);
      store->keep_newest(commit.storage.keep, commit.storage.start);
    } catch (const std::exception& failure) {
      commit.error = failure.what();
      note_failure(commit);
    }
  }
  // What is older than one that is whole is not needed any more, whoever is still at it.
  const auto is_over = [&](const Commit& commit) {
    return !commit.error.empty() || commit.saved.sequence <= newest;
  };
  const std::vector<Commit> all = std::exchange(commits_, {});
  for (const Commit& commit : all) {
    if (!is_over(commit)) {
      commits_.push_back(commit);
      continue;
    }
    for (const int rank : commit.ranks) finish(rank, commit.saved, commit.error);
  }
}

void Persister::note_failure(const Commit& commit) {
  std::vector<int> ranks = commit.ranks;
  if (failed_.saved == commit.saved && failed_.storage.start == commit.storage.start) {
    ranks.insert(ranks.end(), failed_.ranks.begin(), failed_.ranks.end());
  }
  failed_ = commit;
  failed_.ranks = std::move(ranks);
}

void Persister::finish_superseded(int rank) {
  {
    const std::lock_guard lock(mutex_);
    --states_[rank].num_waiting;
  }
  changed_();
}

void Persister::finish(int rank, const SavedStep& saved, const std::string& error) {
  {
    const std::lock_guard lock(mutex_);
    State& state = states_[rank];
    --state.num_waiting;
    const bool is_newer = !state.stored || state.stored->sequence < saved.sequence;
    if (error.empty() && is_newer) state.stored = saved;
    if (!error.empty() && state.error != error) {
      log(LogLevel::Error, "snapshot_not_stored",
          {{"rank", rank}, {"step", static_cast<long>(saved.step)}, {"reason", error}});
    }
    state.error = error;
  }
  changed_();
}

}  // namespace libddp
