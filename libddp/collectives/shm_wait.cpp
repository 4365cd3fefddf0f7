// ShmCore's waiting, from the first pause to the timeout.
//
// NOTE [Rings without a fence]
// A sleeper registers and then looks at the stamps; a poster stores its stamp and then looks at the
// sleepers. With a full fence between store and look no notification is lost; the oversubscribed
// policy has it (sequentially consistent store). With free cores the fence would cost a third of a
// small all-reduce, so the sleeper pays instead: after registering it keeps looking for much longer
// than a store stays in a CPU's buffer. If a notification were lost all the same, the sleep ends by
// itself: the first pieces are short.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/collectives/shm_core.h"

namespace libddp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFirstSleep{1};
constexpr int kLooksBeforeSleep = 200;
constexpr int kSpinsPerLook = 64;

bool spin(WaitCondition& condition, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (condition.ready()) return true;
    relax_cpu();
  }
  return condition.ready();
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

void ShmCore::wait(const CommCall& call, FutexEvent& event, WaitCondition& condition) {
  for (int done = 0; done < policy_.spins; done += kSpinsPerLook) {
    if (spin(condition, std::min(kSpinsPerLook, policy_.spins - done))) return;
    if (latch_.is_set()) break;
  }
  settle(call, event, condition);
}

// The long wait: sleeps in growing pieces, between which it looks at everything that can end it.
void ShmCore::settle(const CommCall& call, FutexEvent& event, WaitCondition& condition) {
  const Clock::time_point start = Clock::now();
  const Deadline deadline = call.timeout ? Deadline::after(*call.timeout) : call.deadline;
  InterruptPoll interrupt;
  std::chrono::milliseconds piece = kFirstSleep;
  int blocker = -1;
  const auto count = [&] {
    const std::chrono::nanoseconds waited = Clock::now() - start;
    if (blocker >= 0) count_wait(blocker, waited.count());
  };
  while (true) {
    Sleeper sleeper(event);
    if (spin(condition, policy_.oversubscribed ? 0 : kLooksBeforeSleep)) return count();
    blocker = condition.blocker();
    // Not at once: with all ranks there, the message about a mismatch can name them all.
    if (piece == kInterruptPeriod) condition.check();
    // A peer may have posted, finished and left (or died) since the look above: then this call is
    // as good as done, and only the next one fails.
    if (has_failed() && !condition.ready()) throw_if_failed(&call);
    if (deadline.expired()) give_up(call, condition, seconds_since(start));
    try {
      interrupt.poll();
    } catch (...) {
      fail({.kind = CommFailure::Kind::Aborted,
            .message = fmt::format("{}: interrupted while waiting",
                                   call.description.to_string(call.sequence))});
      throw;
    }
    sleeper.sleep(deadline.remaining(piece));
    if (condition.ready()) return count();
    piece = std::min(piece * 2, kInterruptPeriod);
  }
}

// Who is waited for after the network may have waited there itself: longer than this rank has,
// which counts that.
void ShmCore::count_wait(int blocker, std::int64_t ns) {
  Delay told;
  if (stage_ == Stage::Last) {
    told = delay_shown_by(blocker);
    const Delay own = delay_shown_by(rank_);
    if (own.rank == told.rank) told.ns -= own.ns;
  }
  waits_.add(group_rank(blocker), ns, told);
}

void ShmCore::show_delay(Delay delay) {
  DelayRecord& shown = pages_[rank_].carried_delay();
  shown.rank.store(delay.rank, std::memory_order_relaxed);
  shown.ns.store(delay.ns, std::memory_order_relaxed);
}

Delay ShmCore::delay_shown_by(int rank) const {
  const DelayRecord& shown = pages_[rank].carried_delay();
  return {static_cast<int>(shown.rank.load(std::memory_order_relaxed)),
          shown.ns.load(std::memory_order_relaxed)};
}

void ShmCore::give_up(const CommCall& call, const WaitCondition& condition, double seconds) {
  constexpr std::size_t kMaxNamed = 8;
  const std::vector<int> missing = condition.missing();
  std::string who;
  for (std::size_t i = 0; i < std::min(missing.size(), kMaxNamed); ++i) {
    const int r = missing[i];
    if (i > 0) who += ", ";
    who +=
        fmt::format("rank {} (pid {}, last call: {})", group_rank(r), pid_of(r), last_call_of(r));
  }
  if (missing.size() > kMaxNamed) who += fmt::format(" and {} more", missing.size() - kMaxNamed);
  if (missing.empty()) who = "any rank";
  std::vector<int> ranks;
  for (const int r : missing) ranks.push_back(group_rank(r));
  const std::string notes = call.notes ? (*call.notes)(ranks) : "";
  const int culprit = missing.size() == 1 ? missing[0] : -1;
  fail_and_throw(
      &call,
      {.kind = CommFailure::Kind::Timeout,
       .message = fmt::format(
           "{}: timed out after {:.1f} s waiting for {}{}. Hint: look at what that rank does; "
           "if it is only slow, raise the timeout of the group",
           call.description.to_string(call.sequence), seconds, who, notes),
       .peer_rank = culprit >= 0 ? group_rank(culprit) : -1,
       .peer_pid = culprit >= 0 ? pid_of(culprit) : 0});
}

}  // namespace libddp
