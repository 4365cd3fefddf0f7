#include "libddp/group/work.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/monotonic_clock.h"
#include "libddp/base/work_queue.h"

namespace libddp {
namespace {

/// A work whose callbacks this thread runs; a callback may finish another one.
class Ending {
 public:
  explicit Ending(const Work& work) : work_(work), outer_(innermost) { innermost = this; }
  ~Ending() { innermost = outer_; }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

  static bool is_here(const Work& work) {
    const Ending* ending = innermost;
    while (ending != nullptr && &ending->work_ != &work) ending = ending->outer_;
    return ending != nullptr;
  }

 private:
  static thread_local const Ending* innermost;

  const Work& work_;
  const Ending* const outer_;
};

thread_local const Ending* Ending::innermost = nullptr;

}  // namespace

Work::Work(std::string description, std::vector<at::Tensor> tensors)
    : text_(std::move(description)), tensors_(std::move(tensors)) {}

Work::Work(const OpDescription& operation, std::uint64_t sequence, std::vector<at::Tensor> tensors)
    : operation_(operation), sequence_(sequence), tensors_(std::move(tensors)) {}

WorkPtr Work::finished(const OpDescription& operation, std::uint64_t sequence,
                       std::vector<at::Tensor> tensors) {
  auto work = std::make_shared<Work>(operation, sequence, std::move(tensors));
  // Nobody else has it yet: no lock, no notification.
  work->is_completed_.store(true, std::memory_order_relaxed);
  return work;
}

std::string Work::description() const {
  return text_.empty() ? operation_.to_string(sequence_) : text_;
}

bool Work::is_completed() const { return is_finished(); }

bool Work::is_finished() const {
  return is_completed_.load(std::memory_order_acquire) || Ending::is_here(*this);
}

void Work::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (!is_finished()) block(timeout);
  if (error_) std::rethrow_exception(error_);
}

void Work::block(std::optional<std::chrono::milliseconds> timeout) {
  const Deadline deadline = timeout ? Deadline::after(*timeout) : Deadline::never();
  std::unique_lock lock(mutex_);
  while (!is_finished()) {
    lock.unlock();
    // A callback of an operation may wait for one that is queued behind it in the same queue.
    const bool has_helped = WorkQueue::run_next_here();
    lock.lock();
    if (has_helped) continue;
    if (is_finished()) return;
    finished_.wait_for(lock, deadline.remaining(kInterruptPeriod));
    if (is_finished()) return;
    lock.unlock();
    check_interrupt();
    if (deadline.expired()) refuse_to_wait(*timeout);
    lock.lock();
  }
}

void Work::refuse_to_wait(std::chrono::milliseconds timeout) const {
  throw TimeoutError(
      fmt::format("libddp: {} is not done after a wait of {:.1f} s; the operation goes on. Hint: "
                  "wait longer, or "
                  "look at what the other ranks are doing.",
                  description(), std::chrono::duration<double>(timeout).count()));
}

std::exception_ptr Work::exception() const { return is_finished() ? error_ : nullptr; }

int Work::source_rank() const { return is_finished() ? source_rank_ : -1; }

void Work::on_complete(std::function<void(Work&)> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!is_finished()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  run_callback(callback);
}

void Work::finish(std::exception_ptr error, int source_rank) {
  std::unique_lock lock(mutex_);
  if (is_finished() || finished_ns_ != 0) return;
  error_ = std::move(error);
  source_rank_ = source_rank;
  finished_ns_ = monotonic_ns();
  const Ending here(*this);
  while (!callbacks_.empty()) {
    auto callbacks = std::exchange(callbacks_, {});
    lock.unlock();
    for (auto& callback : callbacks) {
      run_callback(callback);
      callback = nullptr;  // what it holds may be what the next one's waiters take down
    }
    lock.lock();
  }
  is_completed_.store(true, std::memory_order_release);
  // Under the lock: a waiter may destroy this object as soon as it has the lock.
  finished_.notify_all();
}

void Work::run_callback(const std::function<void(Work&)>& callback) noexcept {
  try {
    callback(*this);
  } catch (const std::exception& error) {
    log(LogLevel::Error, "work_callback_failed",
        {{"operation", description()}, {"error", error.what()}});
  } catch (...) {
    log(LogLevel::Error, "work_callback_failed",
        {{"operation", description()}, {"error", "not a std::exception"}});
  }
}

}  // namespace libddp
