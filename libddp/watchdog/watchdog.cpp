#include "libddp/watchdog/watchdog.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/monotonic_clock.h"
#include "libddp/base/process.h"
#include "libddp/base/service_thread.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

constexpr std::chrono::seconds kGoodbyePatience{5};

constexpr std::int64_t kBeatNs = HeartbeatMonitor::kBeatPeriod.count();
/// An observer that slept longer than this was away itself.
constexpr std::int64_t kAwayNs = 3 * kBeatNs;
/// Between the end of a process's sockets and its own.
constexpr std::chrono::milliseconds kLastMoments{50};
/// While something is about to be decided.
constexpr int kAlertMs = 50;
/// A peer that does not read gets no more heartbeats, so that they never fill its socket.
constexpr int kMostUnread = 2048;

bool reads(int socket) {
  int unread = 0;
  return ::ioctl(socket, SIOCOUTQ, &unread) != 0 || unread < kMostUnread;
}

double seconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-9; }

const char* condition_of(const GroupPeer& peer) {
  // Of one that is not seen the number may belong to another pid namespace.
  switch (peer.process ? process_state(peer.pid) : '\0') {
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
  return peer.process && process_state(peer.pid) == 't';
}

int host_index_of(const std::vector<GroupPeer>& peers, int rank) {
  const auto found = std::find_if(peers.begin(), peers.end(),
                                  [rank](const GroupPeer& peer) { return peer.rank == rank; });
  return found == peers.end() ? 0 : found->host_index;
}

}  // namespace

std::string peer_name(const GroupPeer& peer) {
  return fmt::format("rank {} (pid {} on {})", peer.rank, peer.pid, peer.host);
}

Watchdog::Watchdog(GroupIdentity identity, std::vector<GroupPeer> peers, Comm& comm, Hooks hooks)
    : identity_(std::move(identity)),
      comm_(comm),
      hooks_(std::move(hooks)),
      host_index_(host_index_of(peers, identity_.rank)),
      channels_(std::move(peers), identity_.rank),
      last_sequences_(static_cast<std::size_t>(identity_.world_size)) {
  const auto timeout = heartbeat_timeout();
  for (ControlChannels::Channel& channel : channels_.all()) {
    watched_.push_back({.channel = &channel, .heartbeat = HeartbeatMonitor(timeout)});
  }
  if (watched_.empty()) return;
  stop_ = EventFd::create();
  // Before the ranks are done with the bootstrap: one that freezes at once has been seen to
  // live.
  tick(monotonic_ns());
  thread_ = start_service_thread("libddp-watch", [this] { run(); });
}

Watchdog::~Watchdog() { stop(); }

void Watchdog::stop() {
  if (!thread_.joinable()) return;
  questions_.stop();
  stop_.set();
  thread_.join();
}

void Watchdog::run() {
  std::vector<pollfd> entries;
  while (true) {
    // A negative descriptor is passed over by poll.
    entries.assign({{stop_.fd(), POLLIN, 0}, {comm_.network_fd(), POLLIN, 0}});
    for (const Watched& watched : watched_) {
      if (watched.is_over) continue;
      entries.push_back({watched.peer().control.get(), POLLIN | POLLRDHUP, 0});
      entries.push_back({watched.peer().process.fd(), POLLIN, 0});
    }
    channels_.add_polls(entries);
    if (::poll(entries.data(), entries.size(), pause_ms(monotonic_ns())) < 0 && errno != EINTR) {
      fail({GroupFailure::Kind::Aborted,
            fmt::format("cannot watch the peers: {}", errno_text("poll", errno))});
      return;
    }
    if (entries[0].revents != 0) return;
    if (entries[1].revents != 0) comm_.on_network();
    channels_.after_poll();
    read_all();
    tick(monotonic_ns());
  }
}

void Watchdog::read_all() {
  // Words before losses: a peer that ended because of another one's failure names the culprit.
  std::vector<Watched*> lost;
  for (Watched& watched : watched_) {
    if (!watched.is_over && watched.peer().process.has_ended()) lost.push_back(&watched);
  }
  for (Watched& watched : watched_) {
    if (watched.is_over) continue;
    for (const auto& message : watched.channel->inbox.take(watched.peer().control.get())) {
      handle(watched, message);
    }
    if (watched.channel->inbox.is_closed() || watched.channel->inbox.is_garbled())
      lost.push_back(&watched);
  }
  for (Watched* watched : lost) report_loss(*watched);
}

void Watchdog::handle(Watched& watched, const ControlMessage& message) {
  using Kind = ControlMessage::Kind;
  const int rank = watched.peer().rank;
  switch (message.kind) {
    case Kind::Goodbye: {
      const auto report = reports_.of(rank);
      watched.is_over = true;
      reports_.remove(rank);
      return hooks_.on_goodbye(rank, message.sequence, report ? report->what : "");
    }
    case Kind::Leaving:
      return hooks_.on_departure(rank, Departure::from_bits(message.number));
    case Kind::Calls:
      return hooks_.on_calls(
          rank,
          {.sequence = message.sequence, .chain = message.number, .text = message.failure.message});
    case Kind::Heartbeat:
      ++watched.beats;
      last_sequences_[static_cast<std::size_t>(rank)].store(message.sequence);
      return;
    case Kind::Report:
      return reports_.add(
          rank, {message.sequence, message.number, message.failure.message, monotonic_ns(), rank});
    case Kind::Retraction:
      return reports_.remove(rank);
    case Kind::StacksWanted:
      return questions_.answer(*watched.channel, message.number);
    case Kind::Stacks:
      return questions_.take(rank, message);
    case Kind::Dropped:
      watched.has_dropped = true;
      return;
    case Kind::Failure:
      break;
  }
  const GroupPeer& peer = watched.peer();
  fail(told_by(peer_name(peer), peer.rank, peer.pid, message.failure));
}

void Watchdog::report_loss(Watched& watched) {
  if (watched.is_over) return;
  watched.is_over = true;
  const GroupPeer& peer = watched.peer();
  // The kernel closes the sockets of a dying process just before it reports the end.
  const bool is_remote = peer.host_index != host_index_;
  const bool died = peer.pid != ::getpid() && peer.process.has_ended(kLastMoments);
  const char* how = watched.channel->inbox.is_garbled()
                        ? "sent bytes that are no message of this library"
                    : died ? "died (killed, crashed or exited without destroying the group)"
                    : is_remote && !watched.has_dropped
                        ? "cannot be reached any more (it died or left without destroying the "
                          "group, or its host or the network failed)"
                        : "left without destroying the group";
  GroupFailure failure{
      GroupFailure::Kind::Peer,
      fmt::format("{} {}; its last call was {}, that of this rank {}. Hint: look at that "
                  "process's own output, its exit code and the kernel log (out of memory); a "
                  "program that ends in order calls destroy_process_group (C++: shutdown)",
                  peer_name(peer), how, comm_.last_call_of(peer.rank),
                  comm_.last_call_of(identity_.rank)),
      peer.rank, peer.pid};
  const bool is_gone =
      died || (is_remote && watched.channel->inbox.is_closed() && !watched.has_dropped);
  if (is_gone) return fail_of_loss(std::move(failure));
  fail(std::move(failure));
}

void Watchdog::fail_of_loss(GroupFailure failure) {
  {
    const std::lock_guard lock(loss_mutex_);
    if (!loss_) loss_ = failure;
  }
  fail(std::move(failure));
}

std::optional<GroupFailure> Watchdog::loss() const {
  const std::lock_guard lock(loss_mutex_);
  return loss_;
}

void Watchdog::fail(GroupFailure failure) {
  comm_.fail(failure);
  // The first one counts, which may be another: tell that.
  if (const auto kept = comm_.failure()) announce(*kept);
  hooks_.on_failure();
}

void Watchdog::announce(const GroupFailure& failure) noexcept { channels_.announce(failure); }

void Watchdog::say_leaving(const Departure& departure) noexcept {
  channels_.send_to_all({.kind = ControlMessage::Kind::Leaving, .number = departure.bits()});
}

void Watchdog::say_calls(int rank, const LastCalls& calls) noexcept {
  ControlMessage message{
      .kind = ControlMessage::Kind::Calls, .sequence = calls.sequence, .number = calls.chain};
  message.failure.message = calls.text;
  for (ControlChannels::Channel& channel : channels_.all()) {
    if (channel.peer.rank == rank) channels_.send_to(channel, message);
  }
}

void Watchdog::say_goodbye(std::uint64_t sequence) noexcept {
  // Who leaves because of a failure is not to blame for it, also where the goodbye comes first.
  if (const auto failure = comm_.failure()) announce(*failure);
  channels_.send_to_all({.kind = ControlMessage::Kind::Goodbye, .sequence = sequence});
  channels_.wait_until_sent(kGoodbyePatience);
}

void Watchdog::say_dropped() noexcept {
  channels_.send_to_all({.kind = ControlMessage::Kind::Dropped});
}

void Watchdog::report_error(std::uint64_t sequence, const std::string& what) noexcept {
  ControlMessage message{.kind = ControlMessage::Kind::Report, .sequence = sequence};
  message.number = reports_.add_own(sequence);
  message.failure.message = what;
  channels_.send_to_all(message);
}

void Watchdog::retract_error() noexcept {
  channels_.send_to_all({.kind = ControlMessage::Kind::Retraction});
}

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
    if (auto failure = comm_.look_at_network(now_ns)) fail_of_loss(*std::move(failure));
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
  for (Watched& watched : watched_) {
    const bool is_here = watched.peer().host_index == host_index_;
    if (is_here || watched.is_over || !reads(watched.peer().control.get())) continue;
    channels_.send_to(*watched.channel, message);
  }
}

void Watchdog::judge(Watched& watched, std::int64_t now_ns) {
  const GroupPeer& peer = watched.peer();
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
  const GroupPeer& peer = watched.peer();
  // Someone looks at it: that is no failure, however long it takes.
  if (is_held_by_debugger(peer)) {
    watched.heartbeat = HeartbeatMonitor(std::nullopt);
    return;
  }
  watched.is_over = true;
  fail_of_loss(
      {GroupFailure::Kind::Peer,
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
  // That rank may report what it has met of another one's failure, which this rank is late to see.
  try {
    comm_.throw_if_failed();
  } catch (const Error&) {
    if (const auto kept = comm_.failure()) announce(*kept);
    return hooks_.on_failure();
  }
  for (const Watched& watched : watched_) {
    if (watched.peer().rank != report->rank) continue;
    fail({GroupFailure::Kind::Peer,
          fmt::format("{} met an error {} and has not gone on; this rank waits for it in {}. Hint: "
                      "see that rank's own output; a script that catches errors of a training step "
                      "goes on with the next one at once, or ends",
                      peer_name(watched.peer()), report->what, comm_.last_call_of(identity_.rank)),
          watched.peer().rank, watched.peer().pid});
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
  const std::optional<double> waited = long_wait_.overdue(running, now_ns);
  if (!waited) return;
  std::vector<int> behind;
  std::vector<std::string> names;
  for (const Watched& watched : watched_) {
    if (last_sequence_of(watched.peer().rank).value_or(0) >= running) continue;
    behind.push_back(watched.peer().rank);
    if (behind.size() > 4) continue;
    names.push_back(fmt::format("{}, alive, last call {}", peer_name(watched.peer()),
                                comm_.last_call_of(watched.peer().rank)));
  }
  if (behind.empty() || !reports_for_all(behind)) return;
  log(LogLevel::Warn, "waiting_for_peers",
      {{"group", identity_.name},
       {"call", comm_.last_call_of(identity_.rank)},
       {"seconds", fmt::format("{:.0f}", *waited)},
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
