#include "libddp/base/blocking_calls.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>

#include "libddp/base/interrupt.h"
#include "libddp/base/service_thread.h"

namespace libddp {

struct BlockingCalls::Job {
  std::function<void()> work;
  std::exception_ptr error;
  Deadline::Clock::time_point start = Deadline::Clock::now();
  bool is_done = false;
  bool is_given_up = false;
};

/// Shared with the thread, which may outlive everybody else.
struct BlockingCalls::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> waiting;
  std::shared_ptr<Job> running;
  bool has_thread = false;
  bool is_over = false;

  /// REQUIRES: the lock.
  void give_up(const std::shared_ptr<Job>& job) {
    job->is_given_up = true;
    std::erase(waiting, job);
  }
};

BlockingCalls::BlockingCalls(std::string name)
    : name_(std::move(name)), state_(std::make_shared<State>()) {}

BlockingCalls::~BlockingCalls() {
  const std::lock_guard lock(state_->mutex);
  state_->is_over = true;
  state_->changed.notify_all();
}

void BlockingCalls::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->is_over || !state->waiting.empty(); });
    if (state->waiting.empty()) return;
    const std::shared_ptr<Job> job = state->running = std::move(state->waiting.front());
    state->waiting.pop_front();
    std::function<void()> work = std::move(job->work);
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    work = nullptr;  // what the call owns is gone before its waiter goes on
    lock.lock();
    job->error = std::move(error);
    job->is_done = true;
    state->running.reset();
    state->changed.notify_all();
  }
}

bool BlockingCalls::wait_for(std::function<void()> work, Deadline deadline, const Look& look) {
  const auto job = std::make_shared<Job>();
  job->work = std::move(work);
  std::unique_lock lock(state_->mutex);
  if (!state_->has_thread) {
    start_service_thread(name_, [state = state_] { serve(state); }).detach();
    state_->has_thread = true;
  }
  state_->waiting.push_back(job);
  state_->changed.notify_all();
  while (true) {
    const auto piece = deadline.remaining(kInterruptPeriod);
    if (state_->changed.wait_for(lock, piece, [&] { return job->is_done; })) break;
    if (deadline.expired()) {
      state_->give_up(job);
      return false;
    }
    lock.unlock();
    try {
      check_interrupt();
      if (look) look();
    } catch (...) {
      lock.lock();
      state_->give_up(job);
      throw;
    }
    lock.lock();
  }
  if (job->error) std::rethrow_exception(std::exchange(job->error, nullptr));
  return true;
}

std::optional<std::chrono::duration<double>> BlockingCalls::hanging_for() const {
  const std::lock_guard lock(state_->mutex);
  if (!state_->running || !state_->running->is_given_up) return std::nullopt;
  return Deadline::Clock::now() - state_->running->start;
}

}  // namespace libddp
