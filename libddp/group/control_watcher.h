#pragma once

// Notices within milliseconds that a peer died, failed, gave up or left.
//
// One thread sleeps in poll() on the control sockets and pidfds of the meeting; nothing wakes it
// but an event. The kernel closes the socket of a process that dies; the pidfd also tells when a
// forked child still holds a copy of the socket. The kernel also closes the connection to a host
// that does not answer for seconds. A peer that closes without a goodbye has failed;
// what it said before it closed (its own failure) comes first, so that the root cause wins.
// Thread rule: `announce` from any thread, the rest by the owner; callbacks run in the watcher's
// thread.
//
//   ControlWatcher watcher(identity, std::move(peers), mesh, [](int rank, std::uint64_t last) {});
//   watcher.announce(failure);    // tells the peers
//   watcher.say_goodbye(41);      // leaves in order

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "libddp/collectives/mesh.h"
#include "libddp/group/control_message.h"
#include "libddp/group/group_identity.h"
#include "libddp/transport/meeting.h"

namespace libddp {

/// "rank 2 (pid 4711 on host-a)".
std::string peer_name(const GroupPeer& peer);

class ControlWatcher {
 public:
  /// A peer left in order, having taken part in collectives up to `sequence`.
  using OnGoodbye = std::function<void(int rank, std::uint64_t sequence)>;

  /// Failures go to `mesh.fail`, events of its network to `mesh.on_network`. `mesh` must outlive
  /// the watcher.
  ControlWatcher(GroupIdentity identity, std::vector<GroupPeer> peers, Mesh& mesh,
                 OnGoodbye on_goodbye);
  /// Stops the thread and closes the sockets; peers that got no goodbye take it for a failure.
  ~ControlWatcher();
  ControlWatcher(const ControlWatcher&) = delete;
  ControlWatcher& operator=(const ControlWatcher&) = delete;

  /// Tells the peers what this rank's group failed of. Only the first call does something.
  void announce(const MeshFailure& failure) noexcept;
  void say_goodbye(std::uint64_t sequence) noexcept;

 private:
  struct Watched {
    GroupPeer peer;
    ControlInbox inbox;
    /// Left, or lost and reported: not watched any more.
    bool is_over = false;
  };

  void run();
  void read_all();
  void handle(Watched& watched, const ControlMessage& message);
  bool is_lost(const Watched& watched) const;
  void report_loss(Watched& watched);
  void fail(MeshFailure failure);
  void send_to_all(const ControlMessage& message) noexcept;

  const GroupIdentity identity_;
  Mesh& mesh_;
  const OnGoodbye on_goodbye_;
  int host_index_ = 0;
  std::vector<Watched> watched_;
  std::mutex send_mutex_;
  std::atomic<bool> is_announced_{false};
  UniqueFd stop_;
  std::thread thread_;
};

}  // namespace libddp
