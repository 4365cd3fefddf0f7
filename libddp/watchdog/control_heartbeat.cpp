// What time brings about in the watchdog: beats, verdicts about the peers, reported errors that
// have become failures, and a word about waits that last.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <chrono>

#include "libddp/base/log.h"
#include "libddp/base/monotonic_clock.h"
#include "libddp/base/process.h"
#include "libddp/watchdog/watchdog.h"

namespace libddp {
namespace {

constexpr std::int64_t kBeatNs = HeartbeatMonitor::kBeatPeriod.count();
/// An observer that slept longer than this was away itself.
constexpr std::int64_t kAwayNs = 3 * kBeatNs;
/// While something is about to be decided.
constexpr int kAlertMs = 50;
constexpr std::int64_t kLongWaitNs = 30'000'000'000;
/// A peer that does not read gets no more heartbeats, so that they never fill its socket.
constexpr int kMostUnread = 2048;

bool reads(int socket) {
  int unread = 0;
  return ::ioctl(socket, SIOCOUTQ, &unread) != 0 || unread < kMostUnread;
}

double seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

const char* condition_of(const GroupPeer& peer) {
  // Without a pidfd the number may belong to another pid namespace.
  switch (peer.pidfd ? process_state(peer.pid) : '\0') {
    case 'T':
      return "it is stopped (SIGSTOP or Ctrl-Z)";
    case 't':
      return "it is held by a debugger";
    case 'D':
      return "it hangs in the kernel (a file system or a device does not answer)";
    default:
      return "it is frozen, or its host or the network to it does not answer";
  }
}

bool is_held_by_debugger(const GroupPeer& peer) {
  return peer.pidfd && process_state(peer.pid) == 't';
}

}  // namespace

int Watchdog::pause_ms(std::int64_t now_ns) const {
  if (!reports_.empty()) return kAlertMs;
  for (const Watched& watched : watched_) {
    if (!watched.is_over && watched.heartbeat.is_doubtful(now_ns)) return kAlertMs;
  }
  return static_cast<int>(std::clamp<std::int64_t>(next_beat_ns_ - now_ns, 0, kBeatNs) / 1'000'000 +
                          1);
}

void Watchdog::tick(std::int64_t now_ns) {
  const bool was_away = last_tick_ns_ != 0 && now_ns - last_tick_ns_ > kAwayNs;
  last_tick_ns_ = now_ns;
  if (now_ns >= next_beat_ns_) {
    next_beat_ns_ = now_ns + kBeatNs;
    beat();
    if (auto report = comm_.look_at_network(now_ns)) fail_of_loss(*std::move(report));
  }
  for (Watched& watched : watched_) {
    if (watched.is_over) continue;
    if (was_away) watched.heartbeat.forgive(now_ns);
    judge(watched, now_ns);
  }
  if (comm_.failure()) return;
  check_reports(now_ns);
  check_wait(now_ns);
}

void Watchdog::beat() noexcept {
  comm_.beat();
  const ControlMessage message{.kind = ControlMessage::Kind::Heartbeat,
                               .sequence = comm_.last_sequence_of(identity_.rank).value_or(0)};
  std::lock_guard lock(send_mutex_);
  for (Watched& watched : watched_) {
    const bool is_here = watched.peer.host_index == host_index_;
    if (is_here || watched.is_over || !reads(watched.peer.control.get())) continue;
    send_to(watched, message);
  }
}

void Watchdog::judge(Watched& watched, std::int64_t now_ns) {
  const GroupPeer& peer = watched.peer;
  watched.heartbeat.observe(comm_.beats_of(peer.rank).value_or(watched.beats), now_ns);
  const auto verdict = watched.heartbeat.judge(now_ns);
  if (verdict == HeartbeatMonitor::Verdict::Alive) return;
  // Also in a group that has failed: a group that is being made may need that rank (loss()).
  if (verdict == HeartbeatMonitor::Verdict::Dead) return report_frozen(watched, now_ns);
  if (comm_.failure()) return;
  if (!reports_for_all({peer.rank})) return;
  const bool is_back = verdict == HeartbeatMonitor::Verdict::Back;
  log(LogLevel::Warn, is_back ? "peer_is_back" : "peer_gives_no_sign_of_life",
      {{"group", identity_.name},
       {"peer", peer_name(peer)},
       {"condition", is_back ? "it runs" : condition_of(peer)},
       {"silent_seconds",
        fmt::format("{:.1f}", seconds(watched.heartbeat.silence(now_ns).count()))},
       {"last_call", comm_.last_call_of(peer.rank)}});
}

void Watchdog::report_frozen(Watched& watched, std::int64_t now_ns) {
  const GroupPeer& peer = watched.peer;
  // Someone looks at it: that is no failure, however long it takes.
  if (is_held_by_debugger(peer)) {
    watched.heartbeat = HeartbeatMonitor(std::nullopt);
    return;
  }
  watched.is_over = true;
  fail_of_loss(
      {CommFailure::Kind::Peer,
       fmt::format("{} has given no sign of life for {:.1f} s: {}; its last call was {}, that of "
                   "this rank {}. Hint: see what stopped that process; LIBDDP_HEARTBEAT_TIMEOUT "
                   "sets the seconds, 0 waits for ever",
                   peer_name(peer), seconds(watched.heartbeat.silence(now_ns).count()),
                   condition_of(peer), comm_.last_call_of(peer.rank),
                   comm_.last_call_of(identity_.rank)),
       peer.rank, peer.pid});
}

void Watchdog::check_reports(std::int64_t now_ns) {
  const auto report = reports_.due(hooks_.running(), now_ns);
  if (!report) return;
  for (const Watched& watched : watched_) {
    if (watched.peer.rank != report->rank) continue;
    fail({CommFailure::Kind::Peer,
          fmt::format("{} met an error {} and has not gone on; this rank waits for it in {}. Hint: "
                      "see that rank's own output; a script that catches errors of a training step "
                      "goes on with the next one at once, or ends",
                      peer_name(watched.peer), report->what, comm_.last_call_of(identity_.rank)),
          watched.peer.rank, watched.peer.pid});
  }
}

std::optional<std::uint64_t> Watchdog::last_sequence_of(int rank) const {
  if (const auto known = comm_.last_sequence_of(rank)) return known;
  const std::uint64_t told = last_sequences_[static_cast<std::size_t>(rank)].load();
  return told == 0 ? std::nullopt : std::optional(told);
}

// A rank that is alive may well be busy (a checkpoint, an evaluation): the log says who is waited
// for, and only the operation's timeout ends it.
void Watchdog::check_wait(std::int64_t now_ns) {
  const std::uint64_t running = hooks_.running();
  if (running == 0 || running != waiting_in_) {
    waiting_in_ = running;
    waiting_since_ns_ = now_ns;
    is_wait_logged_ = false;
    return;
  }
  if (is_wait_logged_ || now_ns - waiting_since_ns_ < kLongWaitNs) return;
  is_wait_logged_ = true;
  std::vector<int> behind;
  std::vector<std::string> names;
  for (const Watched& watched : watched_) {
    if (last_sequence_of(watched.peer.rank).value_or(0) >= running) continue;
    behind.push_back(watched.peer.rank);
    if (behind.size() > 4) continue;
    names.push_back(fmt::format("{}, alive, last call {}", peer_name(watched.peer),
                                comm_.last_call_of(watched.peer.rank)));
  }
  if (behind.empty() || !reports_for_all(behind)) return;
  log(LogLevel::Warn, "waiting_for_peers",
      {{"group", identity_.name},
       {"call", comm_.last_call_of(identity_.rank)},
       {"seconds", fmt::format("{:.0f}", seconds(now_ns - waiting_since_ns_))},
       {"num_peers", static_cast<long>(behind.size())},
       {"peers", fmt::format("{}", fmt::join(names, "; "))}});
}

bool Watchdog::reports_for_all(const std::vector<int>& culprits) const {
  for (int rank = 0; rank < identity_.rank; ++rank) {
    if (std::find(culprits.begin(), culprits.end(), rank) == culprits.end()) return false;
  }
  return true;
}

}  // namespace libddp
