#pragma once

// Notices within milliseconds that a peer died, failed, gave up or left, and within seconds that it
// is frozen.
//
// One thread sleeps in poll() on the control sockets and pidfds of the bootstrap. The kernel closes
// the socket of a process that dies; the pidfd also tells when a forked child still holds a copy of
// the socket. The kernel also closes the connection to a host that does not answer for seconds. A
// peer that closes without a goodbye has failed; what it said before it closed (its own failure)
// comes first, so that the root cause wins. Twice a second the thread wakes to beat: into the
// shared page for the ranks of its host, by a message for the others. It needs neither the
// interpreter's lock nor a thread of the program, so a rank that beats but does not come is busy or
// stuck in its own code, and one that does not beat is frozen (heartbeat_monitor.h). Thread rule:
// `announce` from any thread, the rest by the owner; callbacks run in the watchdog's thread.
//
//   Watchdog watchdog(identity, std::move(peers), comm, [](int rank, std::uint64_t last) {});
//   watchdog.announce(failure);    // tells the peers
//   watchdog.say_goodbye(41);      // leaves in order

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/event_fd.h"
#include "libddp/base/group_identity.h"
#include "libddp/collectives/comm.h"
#include "libddp/transport/group_peer.h"
#include "libddp/watchdog/call_chain.h"
#include "libddp/watchdog/control_channels.h"
#include "libddp/watchdog/departure.h"
#include "libddp/watchdog/heartbeat_monitor.h"
#include "libddp/watchdog/long_wait.h"
#include "libddp/watchdog/reported_errors.h"
#include "libddp/watchdog/stack_questions.h"

namespace libddp {

/// "rank 2 (pid 4711 on host-a)".
std::string peer_name(const GroupPeer& peer);

class Watchdog {
 public:
  struct Hooks {
    /// A peer left in order, having taken part in collectives up to `sequence`; `error` = what it
    /// had announced before, or empty.
    std::function<void(int rank, std::uint64_t sequence, const std::string& error)> on_goodbye;
    /// A peer is about to leave.
    std::function<void(int rank, const Departure& departure)> on_departure;
    /// What a peer has called on its device.
    std::function<void(int rank, const LastCalls& calls)> on_calls;
    /// The collective that runs here now; 0 = none.
    std::function<std::uint64_t()> running;
    /// The group has failed here through what the watchdog noticed.
    std::function<void()> on_failure;
  };

  /// Failures go to `comm.fail`, events of its network to `comm.on_network`. `comm` must outlive
  /// the watchdog. Throws ArgumentError for a bad LIBDDP_HEARTBEAT_TIMEOUT.
  Watchdog(GroupIdentity identity, std::vector<GroupPeer> peers, Comm& comm, Hooks hooks);
  /// Closes the sockets too; peers that got no goodbye take it for a failure.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Ends the thread: no hook is called any more, and questions for stacks get no answer. What is
  /// announced still reaches the peers. Not from the watchdog's thread; once or more.
  void stop();

  /// Tells the peers what this rank's group failed of. Only the first call does something.
  void announce(const GroupFailure& failure) noexcept;
  /// This rank will say goodbye, but waits for messages.
  void say_leaving(const Departure& departure) noexcept;
  /// To one peer, what this rank has called on its device.
  void say_calls(int rank, const LastCalls& calls) noexcept;
  /// Leaves in order; where the group has failed here, tells that first. Waits up to 5 seconds for
  /// peers that do not read what they are told: they would take the end for a death.
  void say_goodbye(std::uint64_t sequence) noexcept;
  /// Leaves without order: the peers' groups fail of it, but they know that the process lives.
  void say_dropped() noexcept;
  /// See ProcessGroup::report_error; `sequence`: the last collective issued here.
  void report_error(std::uint64_t sequence, const std::string& what) noexcept;
  void retract_error() noexcept;

  /// See StackQuestions::ask. Not from the watchdog's thread.
  std::map<int, std::string> ask_for_stacks(const std::vector<int>& ranks,
                                            std::chrono::milliseconds limit) {
    return questions_.ask(ranks, limit);
  }
  /// Number of the collective that `rank` began last, as far as is known here.
  std::optional<std::uint64_t> last_sequence_of(int rank) const;
  /// See Backend::loss; what was found here first.
  std::optional<GroupFailure> loss() const;

 private:
  struct Watched {
    ControlChannels::Channel* channel = nullptr;
    HeartbeatMonitor heartbeat{std::nullopt};
    /// Left, or lost and reported: not watched any more.
    bool is_over = false;
    bool has_dropped = false;
    /// What heartbeats have said; for ranks of other hosts.
    std::uint64_t beats = 0;

    const GroupPeer& peer() const { return channel->peer; }
  };

  void run();
  void read_all();
  void handle(Watched& watched, const ControlMessage& message);
  void report_loss(Watched& watched);
  /// The peer is gone, or the network to it: keeps that beside the group's first failure.
  void fail_of_loss(GroupFailure failure);
  void fail(GroupFailure failure);

  // What time brings about.
  int pause_ms(std::int64_t now_ns) const;
  void tick(std::int64_t now_ns);
  void beat() noexcept;
  void judge(Watched& watched, std::int64_t now_ns);
  void report_frozen(Watched& watched, std::int64_t now_ns);
  void check_reports(std::int64_t now_ns);
  void check_wait(std::int64_t now_ns);
  /// One rank of the others speaks for all in the log: the lowest that is not `culprits`.
  bool reports_for_all(const std::vector<int>& culprits) const;

  const GroupIdentity identity_;
  Comm& comm_;
  const Hooks hooks_;
  const int host_index_;
  ControlChannels channels_;
  StackQuestions questions_{channels_};
  std::vector<Watched> watched_;
  ReportedErrors reports_;
  /// What heartbeats from other hosts have said, by rank.
  std::vector<std::atomic<std::uint64_t>> last_sequences_;
  mutable std::mutex loss_mutex_;
  std::optional<GroupFailure> loss_;
  // Of the thread.
  std::int64_t next_beat_ns_ = 0;
  std::int64_t last_tick_ns_ = 0;
  LongWait long_wait_;
  EventFd stop_;
  std::thread thread_;
};

}  // namespace libddp
