#include "libddp/collectives/shm_waiter.h"

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
#include "libddp/collectives/futex_event.h"

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

ShmWaiter::ShmWaiter(const ShmPeers& peers, ShmFailure& failure)
    : peers_(peers),
      failure_(failure),
      policy_(WaitPolicy::choose(peers.cpu_masks())),
      ledger_(peers.group_size()) {}

void ShmWaiter::begin(bool is_last_stage) {
  is_last_stage_ = is_last_stage;
  // The hosts have met, by this rank or another one: earlier waits do not delay anybody any more.
  if (is_last_stage) ledger_.forget();
}

void ShmWaiter::wait(const CommCall& call, FutexEvent& event, WaitCondition& condition) {
  for (int done = 0; done < policy_.spins; done += kSpinsPerLook) {
    if (spin(condition, std::min(kSpinsPerLook, policy_.spins - done))) return;
    if (failure_.is_set()) break;
  }
  settle(call, event, condition);
}

// The long wait: sleeps in growing pieces, between which it looks at everything that can end it.
void ShmWaiter::settle(const CommCall& call, FutexEvent& event, WaitCondition& condition) {
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
    if (failure_.has_failed() && !condition.ready()) failure_.throw_if_failed(&call);
    if (deadline.expired()) give_up(call, condition, seconds_since(start));
    try {
      interrupt.poll();
    } catch (...) {
      failure_.fail({.kind = GroupFailure::Kind::Aborted,
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
void ShmWaiter::count_wait(int blocker, std::int64_t ns) {
  Delay told;
  if (is_last_stage_) {
    told = peers_.delay_shown_by(blocker);
    const Delay own = peers_.delay_shown_by(peers_.rank());
    if (own.rank == told.rank) told.ns -= own.ns;
  }
  ledger_.add(peers_.group_rank(blocker), ns, told);
}

void ShmWaiter::give_up(const CommCall& call, const WaitCondition& condition, double seconds) {
  constexpr std::size_t kMaxNamed = 8;
  const std::vector<int> missing = condition.missing();
  std::string who;
  for (std::size_t i = 0; i < std::min(missing.size(), kMaxNamed); ++i) {
    const int r = missing[i];
    if (i > 0) who += ", ";
    who += fmt::format("rank {} (pid {}, last call: {})", peers_.group_rank(r), peers_.pid_of(r),
                       peers_.last_call_of(r));
  }
  if (missing.size() > kMaxNamed) who += fmt::format(" and {} more", missing.size() - kMaxNamed);
  if (missing.empty()) who = "any rank";
  std::vector<int> ranks;
  for (const int r : missing) ranks.push_back(peers_.group_rank(r));
  const std::string notes = call.notes ? (*call.notes)(ranks) : "";
  const int culprit = missing.size() == 1 ? missing[0] : -1;
  failure_.fail_and_throw(
      &call,
      {.kind = GroupFailure::Kind::Timeout,
       .message = fmt::format(
           "{}: timed out after {:.1f} s waiting for {}{}. Hint: look at what that rank does; "
           "if it is only slow, raise the timeout of the group",
           call.description.to_string(call.sequence), seconds, who, notes),
       .peer_rank = culprit >= 0 ? peers_.group_rank(culprit) : -1,
       .peer_pid = culprit >= 0 ? peers_.pid_of(culprit) : 0});
}

}  // namespace libddp
