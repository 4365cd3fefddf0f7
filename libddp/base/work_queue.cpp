#include "libddp/base/work_queue.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "libddp/base/interrupt.h"
#include "libddp/base/service_thread.h"

namespace libddp {

/// Shared with the worker, which may outlive the WorkQueue for the few instructions after a job
/// whose callback destroyed the group.
struct WorkQueue::State {
  std::string thread_name;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool is_running = false;
  bool is_stopping = false;
  int num_drainers = 0;
  std::uint64_t sequence = 0;
  std::thread worker;

  bool is_idle() const { return !is_running && jobs.empty(); }
};

/// Of a worker: its queue, and whether the job under way calls back.
struct WorkQueue::Here {
  State* serves = nullptr;
  bool is_calling_back = false;
};

WorkQueue::Here& WorkQueue::here() {
  thread_local Here here;
  return here;
}

WorkQueue::CallbackScope::CallbackScope() { here().is_calling_back = true; }

WorkQueue::CallbackScope::~CallbackScope() { here().is_calling_back = false; }

bool WorkQueue::run_next_here() {
  const Here& here = WorkQueue::here();
  return here.serves != nullptr && here.is_calling_back && run_next(*here.serves);
}

bool WorkQueue::run_next(State& state) {
  Job job;
  {
    const std::lock_guard lock(state.mutex);
    if (state.jobs.empty()) return false;
    job = std::move(state.jobs.front());
    state.jobs.pop_front();
  }
  // The job that runs now has its operation still before it.
  const bool was_calling_back = std::exchange(here().is_calling_back, false);
  job();
  job = nullptr;
  here().is_calling_back = was_calling_back;
  return true;
}

WorkQueue::WorkQueue(std::string thread_name) : state_(std::make_shared<State>()) {
  state_->thread_name = std::move(thread_name);
}

WorkQueue::~WorkQueue() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.is_stopping = true;
  state.changed.notify_all();
  if (!state.worker.joinable()) return;
  if (state.worker.get_id() != std::this_thread::get_id()) {
    lock.unlock();
    state.worker.join();
    return;
  }
  // On the worker: a callback dropped the last reference. Nobody else will run the jobs.
  state.worker.detach();
  lock.unlock();
  while (run_next(state)) continue;
}

std::optional<std::uint64_t> WorkQueue::try_begin() {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  if (!state.is_idle()) return std::nullopt;
  state.is_running = true;
  return ++state.sequence;
}

void WorkQueue::end() noexcept {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  state.is_running = false;
  if (!state.jobs.empty() || state.num_drainers > 0) state.changed.notify_all();
}

void WorkQueue::enqueue(const std::function<Job(std::uint64_t sequence)>& make) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  if (!state.worker.joinable()) {
    state.worker = start_service_thread(state.thread_name, [shared = state_] { work(shared); });
  }
  state.jobs.push_back(make(state.sequence + 1));
  ++state.sequence;
  state.changed.notify_all();
}

void WorkQueue::drain() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.worker.get_id() == std::this_thread::get_id()) return;
  ++state.num_drainers;
  struct Leave {
    State& state;
    std::unique_lock<std::mutex>& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      --state.num_drainers;
    }
  } leave{state, lock};
  while (!state.is_idle()) {
    state.changed.wait_for(lock, kInterruptPeriod);
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
}

bool WorkQueue::is_idle() const {
  std::lock_guard lock(state_->mutex);
  return state_->is_idle();
}

std::uint64_t WorkQueue::sequence() const {
  std::lock_guard lock(state_->mutex);
  return state_->sequence;
}

void WorkQueue::work(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  here().serves = &state;
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(
        lock, [&] { return !state.is_running && (!state.jobs.empty() || state.is_stopping); });
    if (state.jobs.empty()) return;
    Job job = std::move(state.jobs.front());
    state.jobs.pop_front();
    state.is_running = true;
    lock.unlock();
    job();
    job = nullptr;  // what the job keeps alive may end here, outside the lock
    lock.lock();
    state.is_running = false;
    if (state.num_drainers > 0 && state.is_idle()) state.changed.notify_all();
  }
}

}  // namespace libddp
