#pragma once

// Losses of connections between hosts as failures of the group: whose they are, and the words.
// Thread rule: free functions.
//
//   local.fail(lost_connection({rank, pid, name}, socket, error));

#include <sys/types.h>

#include <optional>
#include <string>

#include "libddp/collectives/comm.h"
#include "libddp/transport/link_health.h"

namespace libddp {

/// Who is at the other end.
struct LinkEnd {
  int rank = -1;
  pid_t pid = 0;
  /// "rank 3 (pid 4711 on host-b)".
  std::string name;
};

/// `error`: errno of the call that found it, 0 = the other side closed it. To be asked once the
/// control connections have had time to tell that a process ended: then an error is the network's.
GroupFailure lost_connection(const LinkEnd& end, int socket, int error);

std::optional<GroupFailure> network_failure(const std::optional<LinkHealth::Dead>& dead);

}  // namespace libddp
