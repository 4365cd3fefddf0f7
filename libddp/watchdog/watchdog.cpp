#include "libddp/watchdog/watchdog.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/monotonic_clock.h"
#include "libddp/base/service_thread.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

constexpr std::chrono::seconds kGoodbyePatience{5};

/// Makes an eventfd readable.
void ring(const UniqueFd& event) {
  const std::uint64_t one = 1;
  // Cannot fail: the counter takes 2^64 - 2 of these.
  static_cast<void>(!::write(event.get(), &one, sizeof(one)));
}

void quieten(const UniqueFd& event) {
  std::uint64_t count = 0;
  static_cast<void>(!::read(event.get(), &count, sizeof(count)));
}

bool is_ended(const UniqueFd& pidfd, int wait_ms) {
  if (!pidfd) return false;
  pollfd entry{pidfd.get(), POLLIN, 0};
  return ::poll(&entry, 1, wait_ms) > 0;
}

}  // namespace

std::string peer_name(const GroupPeer& peer) {
  return fmt::format("rank {} (pid {} on {})", peer.rank, peer.pid, peer.host);
}

Watchdog::Watchdog(GroupIdentity identity, std::vector<GroupPeer> peers, Comm& comm, Hooks hooks)
    : identity_(std::move(identity)),
      comm_(comm),
      hooks_(std::move(hooks)),
      last_sequences_(peers.size()) {
  const auto timeout = heartbeat_timeout();
  for (GroupPeer& peer : peers) {
    if (peer.rank == identity_.rank) host_index_ = peer.host_index;
    if (peer.rank == identity_.rank) continue;
    Watched watched;
    watched.peer = std::move(peer);
    watched.heartbeat = HeartbeatMonitor(timeout);
    watched_.push_back(std::move(watched));
  }
  if (watched_.empty()) return;
  stop_.reset(::eventfd(0, EFD_CLOEXEC));
  unsent_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_ || !unsent_)
    throw Error(fmt::format("{}: {}", identity_.where(), errno_text("eventfd", errno)));
  // Before the ranks are done with meeting each other: one that freezes at once has been seen to
  // live.
  tick(monotonic_ns());
  thread_ = start_service_thread("libddp-watch", [this] { run(); });
}

Watchdog::~Watchdog() { stop(); }

void Watchdog::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(stacks_mutex_);
    is_stopped_ = true;
    stacks_came_.notify_all();
  }
  ring(stop_);
  thread_.join();
}

void Watchdog::run() {
  std::vector<pollfd> entries;
  while (true) {
    // A negative descriptor is passed over by poll.
    entries.assign(
        {{stop_.get(), POLLIN, 0}, {comm_.network_fd(), POLLIN, 0}, {unsent_.get(), POLLIN, 0}});
    for (const Watched& watched : watched_) {
      if (watched.is_over) continue;
      entries.push_back({watched.peer.control.get(), POLLIN | POLLRDHUP, 0});
      if (watched.peer.pidfd) entries.push_back({watched.peer.pidfd.get(), POLLIN, 0});
    }
    add_unsent(entries);
    if (::poll(entries.data(), entries.size(), pause_ms(monotonic_ns())) < 0 && errno != EINTR) {
      fail({CommFailure::Kind::Aborted,
            fmt::format("cannot watch the peers: {}", errno_text("poll", errno))});
      return;
    }
    if (entries[0].revents != 0) return;
    if (entries[1].revents != 0) comm_.on_network();
    if (entries[2].revents != 0) quieten(unsent_);
    flush_all();
    read_all();
    tick(monotonic_ns());
  }
}

void Watchdog::read_all() {
  // Words before losses: a peer that ended because of another one's failure names the culprit.
  std::vector<Watched*> lost;
  for (Watched& watched : watched_) {
    if (!watched.is_over && is_lost(watched)) lost.push_back(&watched);
  }
  for (Watched& watched : watched_) {
    if (watched.is_over) continue;
    for (const auto& message : watched.inbox.take(watched.peer.control.get())) {
      handle(watched, message);
    }
    if (watched.inbox.is_closed() || watched.inbox.is_garbled()) lost.push_back(&watched);
  }
  for (Watched* watched : lost) report_loss(*watched);
}

bool Watchdog::is_lost(const Watched& watched) const { return is_ended(watched.peer.pidfd, 0); }

void Watchdog::handle(Watched& watched, const ControlMessage& message) {
  using Kind = ControlMessage::Kind;
  const int rank = watched.peer.rank;
  switch (message.kind) {
    case Kind::Goodbye: {
      const auto report = reports_.of(rank);
      watched.is_over = true;
      reports_.remove(rank);
      return hooks_.on_goodbye(rank, message.sequence, report ? report->what : "");
    }
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
      return answer_stacks(watched, message.number);
    case Kind::Stacks:
      return take_stacks(rank, message);
    case Kind::Dropped:
      watched.has_dropped = true;
      return;
    case Kind::Failure:
      break;
  }
  // A failure that names its culprit, or the network, is passed on; an abort or a timeout is the
  // sender's own doing.
  CommFailure failure = message.failure;
  if (failure.kind == CommFailure::Kind::Timeout || failure.kind == CommFailure::Kind::Aborted) {
    const char* verb = failure.kind == CommFailure::Kind::Aborted ? "aborted" : "gave up";
    failure.message = fmt::format("{} {}: {}", peer_name(watched.peer), verb, failure.message);
    failure.kind = CommFailure::Kind::Peer;
    failure.peer_rank = rank;
    failure.peer_pid = watched.peer.pid;
  }
  fail(std::move(failure));
}

void Watchdog::report_loss(Watched& watched) {
  if (watched.is_over) return;
  watched.is_over = true;
  const GroupPeer& peer = watched.peer;
  // The kernel closes the sockets of a dying process just before it reports the end.
  const bool is_remote = peer.host_index != host_index_;
  const bool died = peer.pid != ::getpid() && is_ended(peer.pidfd, 50);
  const char* how = watched.inbox.is_garbled() ? "sent bytes that are no message of this library"
                    : died ? "died (killed, crashed or exited without destroying the group)"
                    : is_remote && !watched.has_dropped
                        ? "cannot be reached any more (it died or left without destroying the "
                          "group, or its host or the network failed)"
                        : "left without destroying the group";
  CommFailure failure{
      CommFailure::Kind::Peer,
      fmt::format("{} {}; its last call was {}, that of this rank {}. Hint: look at that "
                  "process's own output, its exit code and the kernel log (out of memory); a "
                  "program that ends in order calls destroy_process_group (C++: shutdown)",
                  peer_name(peer), how, comm_.last_call_of(peer.rank),
                  comm_.last_call_of(identity_.rank)),
      peer.rank, peer.pid};
  const bool is_gone = died || (is_remote && watched.inbox.is_closed() && !watched.has_dropped);
  if (is_gone) return fail_of_loss(std::move(failure));
  fail(std::move(failure));
}

void Watchdog::fail_of_loss(CommFailure failure) {
  {
    const std::lock_guard lock(loss_mutex_);
    if (!loss_) loss_ = failure;
  }
  fail(std::move(failure));
}

std::optional<CommFailure> Watchdog::loss() const {
  const std::lock_guard lock(loss_mutex_);
  return loss_;
}

void Watchdog::fail(CommFailure failure) {
  comm_.fail(failure);
  // The first one counts, which may be another: tell that.
  if (const auto kept = comm_.failure()) announce(*kept);
  hooks_.on_failure();
}

void Watchdog::announce(const CommFailure& failure) noexcept {
  // Under the lock: whatever another thread says next comes after it.
  std::lock_guard lock(send_mutex_);
  if (is_announced_) return;
  is_announced_ = true;
  send_to_all_locked({.kind = ControlMessage::Kind::Failure, .failure = failure});
}

void Watchdog::say_goodbye(std::uint64_t sequence) noexcept {
  // Who leaves because of a failure is not to blame for it, also where the goodbye comes first.
  if (const auto failure = comm_.failure()) announce(*failure);
  send_to_all({.kind = ControlMessage::Kind::Goodbye, .sequence = sequence});
  const Deadline patience = Deadline::after(kGoodbyePatience);
  for (std::vector<pollfd> entries; !patience.expired(); entries.clear()) {
    add_unsent(entries);
    if (entries.empty()) return;
    ::poll(entries.data(), entries.size(), 50);
    flush_all();
  }
}

void Watchdog::say_dropped() noexcept { send_to_all({.kind = ControlMessage::Kind::Dropped}); }

bool Watchdog::send_to(Watched& watched, const ControlMessage& message) noexcept {
  const bool is_there = watched.outbox.send(watched.peer.control.get(), message);
  if (!watched.outbox.is_empty()) ring(unsent_);
  return is_there;
}

void Watchdog::add_unsent(std::vector<pollfd>& entries) noexcept {
  std::lock_guard lock(send_mutex_);
  for (const Watched& watched : watched_) {
    if (!watched.outbox.is_empty()) entries.push_back({watched.peer.control.get(), POLLOUT, 0});
  }
}

void Watchdog::flush_all() noexcept {
  std::lock_guard lock(send_mutex_);
  for (Watched& watched : watched_) watched.outbox.flush(watched.peer.control.get());
}

void Watchdog::report_error(std::uint64_t sequence, const std::string& what) noexcept {
  ControlMessage message{.kind = ControlMessage::Kind::Report, .sequence = sequence};
  message.number = reports_.add_own(sequence);
  message.failure.message = what;
  send_to_all(message);
}

void Watchdog::retract_error() noexcept { send_to_all({.kind = ControlMessage::Kind::Retraction}); }

void Watchdog::send_to_all(const ControlMessage& message) noexcept {
  std::lock_guard lock(send_mutex_);
  send_to_all_locked(message);
}

void Watchdog::send_to_all_locked(const ControlMessage& message) noexcept {
  for (Watched& watched : watched_) send_to(watched, message);
}

}  // namespace libddp
