#include "libddp/interop/c10d_waiters.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/interrupt.h"
#include "libddp/base/process.h"
#include "libddp/base/service_thread.h"

namespace libddp {

struct C10dWaiters::State {
  struct Task {
    std::function<void()> wait;
    std::function<void(std::exception_ptr)> done;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::condition_variable drained;
  std::deque<Task> queue;
  std::vector<std::thread> threads;
  std::size_t num_idle = 0;
  /// In the queue, or in their wait.
  std::size_t num_waiting = 0;
  /// These, and those that let go.
  std::size_t num_unfinished = 0;
  bool is_stopping = false;
  /// The interpreter goes away.
  bool keeps = false;

  bool is_own_thread() const {
    return std::any_of(threads.begin(), threads.end(), [](const std::thread& thread) {
      return thread.get_id() == std::this_thread::get_id();
    });
  }
};

struct C10dWaiters::Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<State>> states;
  const ProcessStamp made;

  /// Never freed: threads may outlive static destructors.
  static Registry& get() {
    static auto* const instance = new Registry();
    return *instance;
  }
};

C10dWaiters::C10dWaiters() : state_(std::make_shared<State>()) {
  Registry& known = Registry::get();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.states, [](const auto& state) { return state.expired(); });
  known.states.push_back(state_);
}

C10dWaiters::~C10dWaiters() {
  std::vector<std::thread> threads;
  bool is_idle = false;
  {
    std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
    state_->changed.notify_all();
    is_idle = state_->num_waiting == 0;
    threads.swap(state_->threads);
  }
  for (std::thread& thread : threads) {
    if (is_idle && thread.get_id() != std::this_thread::get_id()) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

void C10dWaiters::watch(std::function<void()> wait, std::function<void(std::exception_ptr)> done) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  state.queue.push_back({std::move(wait), std::move(done)});
  ++state.num_waiting;
  ++state.num_unfinished;
  if (state.queue.size() > state.num_idle) {
    state.threads.push_back(
        start_service_thread("libddp-c10d", [shared = state_] { work(shared); }));
  } else {
    state.changed.notify_one();
  }
}

bool C10dWaiters::is_idle() const {
  std::lock_guard lock(state_->mutex);
  return state_->num_waiting == 0;
}

void C10dWaiters::drain(const std::function<bool()>& gives_up) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.is_own_thread()) return;
  while (state.num_unfinished > 0) {
    state.drained.wait_for(lock, kInterruptPeriod);
    lock.unlock();
    check_interrupt();
    const bool is_enough = gives_up();
    lock.lock();
    if (is_enough) return;
  }
}

void C10dWaiters::settle_all() {
  constexpr std::chrono::seconds kPatience{1};
  Registry& known = Registry::get();
  if (!known.made.is_current()) return;
  std::vector<std::weak_ptr<State>> states;
  {
    const std::lock_guard lock(known.mutex);
    states = known.states;
  }
  for (const auto& weak : states) {
    const std::shared_ptr<State> state = weak.lock();
    if (!state) continue;
    std::unique_lock lock(state->mutex);
    state->keeps = true;
    state->drained.wait_for(lock, kPatience,
                            [&] { return state->num_unfinished == state->num_waiting; });
  }
}

void C10dWaiters::work(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  std::unique_lock lock(state.mutex);
  while (true) {
    ++state.num_idle;
    state.changed.wait(lock, [&] { return !state.queue.empty() || state.is_stopping; });
    --state.num_idle;
    if (state.queue.empty()) return;
    State::Task task = std::move(state.queue.front());
    state.queue.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task.wait();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --state.num_waiting;
    if (state.keeps) {
      new std::pair(std::move(task), std::move(error));  // an error may be Python's, too
    } else {
      lock.unlock();
      task.done(std::move(error));
      task = {};  // what it keeps alive may end here, outside the lock
      lock.lock();
    }
    --state.num_unfinished;
    if (state.num_unfinished == state.num_waiting) state.drained.notify_all();
  }
}

}  // namespace libddp
