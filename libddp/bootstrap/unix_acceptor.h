#pragma once

// The accepting side of the connections within a host: takes processes of this user that send a
// whole request, in the order in which they do. Used by bootstrap.cpp. See pending_connections.h.
// Thread rule: one thread.
//
//   UnixAcceptor acceptor;
//   for (AdmittedPeer& admitted : acceptor.admit(std::chrono::milliseconds(100))) ...

#include <poll.h>

#include <chrono>
#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/pending_connections.h"
#include "libddp/transport/frame.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {

struct AdmittedPeer {
  UniqueFd socket;
  Frame request;
};

class UnixAcceptor {
 public:
  static constexpr FrameLimits kLimits{.max_bytes = 1024, .max_descriptors = 64};
  /// Generous, as it costs little: a stopped process is a rank too.
  static constexpr std::chrono::seconds kPatience{30};

  explicit UnixAcceptor(UnixListener listener = UnixListener::open());

  const std::string& name() const { return listener_.name(); }
  /// Those who have sent their request; waits for one at most `limit`.
  std::vector<AdmittedPeer> admit(std::chrono::milliseconds limit);
  /// What to wait for where admit() is not all that a thread waits for.
  void add_polls(std::vector<pollfd>& entries) const {
    pending_.add_polls(listener_.fd(), entries);
  }
  /// Says in the log why one of them is not let in after all.
  void refuse(const std::string& reason) { pending_.report(reason); }

 private:
  void wait(std::chrono::milliseconds limit) const;
  void hear(PendingConnection& pending, std::vector<AdmittedPeer>& all_admitted);

  UnixListener listener_;
  PendingConnections<PendingConnection> pending_;
};

}  // namespace libddp
