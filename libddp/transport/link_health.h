#pragma once

// Notices connections that the network no longer carries while both processes live: a stateful
// firewall or a NAT has forgotten them, and drops what comes.
//
// The kernel would go on sending for a quarter of an hour. TCP_USER_TIMEOUT ends that sooner, but
// also ends a connection whose far end is only busy and reads nothing; so this looks at what the
// kernel counts: bytes, or probes, that have had no acknowledgement for long. A process that is
// stopped acknowledges (its kernel does), one that does not read does too.
// Thread rule: one thread. The sockets must outlive it.
//
//   LinkHealth health;
//   health.watch(socket, "rank 3 (pid 4711 on host-b)", 3, 4711);
//   if (const auto dead = health.look(monotonic_ns())) fail(dead->text);   // twice a second

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace libddp {

class LinkHealth {
 public:
  /// So long nothing may be acknowledged: longer than the control connections wait, which have more
  /// to say of a host that is gone.
  static constexpr std::int64_t kPatienceNs = 9'000'000'000;

  struct Dead {
    int rank = -1;
    pid_t pid = 0;
    /// What happened, and the hint.
    std::string text;
  };

  /// `peer`: whom it leads to, for messages.
  void watch(int socket, std::string peer, int rank, pid_t pid);
  /// The first that is dead, if one is.
  std::optional<Dead> look(std::int64_t now_ns);

 private:
  struct Link {
    int socket = -1;
    std::string peer;
    int rank = -1;
    pid_t pid = 0;
    /// Since when nothing has been acknowledged; 0 = nothing is owed.
    std::int64_t owed_since_ns = 0;
  };

  std::vector<Link> links_;
};

/// "10.0.0.1:4711 to 10.0.0.2:29500".
std::string connection_text(int socket);

}  // namespace libddp
