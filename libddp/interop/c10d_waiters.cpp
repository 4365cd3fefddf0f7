#include "libddp/interop/c10d_waiters.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/interrupt.h"
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
  std::size_t num_unfinished = 0;
  bool is_stopping = false;

  bool is_own_thread() const {
    return std::any_of(threads.begin(), threads.end(), [](const std::thread& thread) {
      return thread.get_id() == std::this_thread::get_id();
    });
  }
};

C10dWaiters::C10dWaiters() : state_(std::make_shared<State>()) {}

C10dWaiters::~C10dWaiters() {
  std::vector<std::thread> threads;
  bool is_idle = false;
  {
    std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
    state_->changed.notify_all();
    is_idle = state_->num_unfinished == 0;
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
  return state_->num_unfinished == 0;
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
    task.done(error);
    task = {};  // what it keeps alive may end here, outside the lock
    lock.lock();
    if (--state.num_unfinished == 0) state.drained.notify_all();
  }
}

}  // namespace libddp
