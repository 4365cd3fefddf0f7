#include "libddp/interop/foreign_clock.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/service_thread.h"

namespace libddp {
namespace {

using Moment = Deadline::Clock::time_point;

/// Keeps sums within the clock's range.
constexpr std::chrono::hours kLongestTimeout{24 * 365};

}  // namespace

struct ForeignClock::State {
  struct Call {
    Moment start{};
    std::chrono::milliseconds timeout{};
    Kind kind = Kind::Collective;
    std::function<void()> late;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, Call> calls;
  std::uint64_t num_started = 0;
  /// When a collective ended last.
  Moment last_end = Moment::min();
  /// When the thread looks again by itself.
  Moment next_look = Moment::max();
  bool is_stopping = false;

  Moment end_of(const Call& call) const {
    const Moment start =
        call.kind == Kind::Collective ? std::max(call.start, last_end) : call.start;
    return start + call.timeout + kGrace;
  }
};

ForeignClock::ForeignClock() : state_(std::make_shared<State>()) {}

ForeignClock::~ForeignClock() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
    state_->changed.notify_all();
  }
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

std::uint64_t ForeignClock::start(std::chrono::milliseconds timeout, Kind kind,
                                  std::function<void()> late) {
  const std::lock_guard lock(state_->mutex);
  State& state = *state_;
  if (!thread_.joinable()) {
    thread_ = start_service_thread("libddp-clock", [shared = state_] { run(shared); });
  }
  State::Call call{Deadline::Clock::now(),
                   std::min<std::chrono::milliseconds>(timeout, kLongestTimeout), kind,
                   std::move(late)};
  const bool is_next = state.end_of(call) < state.next_look;
  state.calls.emplace(++state.num_started, std::move(call));
  if (is_next) state.changed.notify_all();
  return state.num_started;
}

void ForeignClock::end(std::uint64_t ticket) {
  State::Call call;  // what it holds is let go outside the lock
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->calls.find(ticket);
  if (found == state_->calls.end()) return;
  call = std::move(found->second);
  state_->calls.erase(found);
  if (call.kind == Kind::Collective) state_->last_end = Deadline::Clock::now();
}

void ForeignClock::run(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  std::unique_lock lock(state.mutex);
  while (!state.is_stopping) {
    const auto next = std::min_element(
        state.calls.begin(), state.calls.end(), [&](const auto& one, const auto& other) {
          return state.end_of(one.second) < state.end_of(other.second);
        });
    if (next == state.calls.end()) {
      state.next_look = Moment::max();
      state.changed.wait(lock);
      continue;
    }
    state.next_look = state.end_of(next->second);
    const Moment now = Deadline::Clock::now();
    if (now < state.next_look) {
      state.changed.wait_for(lock, state.next_look - now);
      continue;
    }
    std::function<void()> late = std::move(next->second.late);
    state.calls.erase(next);
    lock.unlock();
    late();
    late = nullptr;
    lock.lock();
  }
}

}  // namespace libddp
