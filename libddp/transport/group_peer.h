#pragma once

// Another rank of the group, and the descriptors over which this process reaches it.
// Thread rule: value, with one owner.
//
//   for (const GroupPeer& peer : peers) watch(peer.control.get());

#include <sys/types.h>

#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/transport/process_handle.h"

namespace libddp {

/// What a rank knows of another once they have met. For the own rank: no descriptors, no sockets.
struct GroupPeer {
  int rank = 0;
  pid_t pid = 0;
  std::string host;
  std::string note;
  /// Equal for ranks that share memory; hosts count from 0 in the order of their lowest ranks.
  int host_index = 0;
  /// Stream socket that lives as long as both processes.
  UniqueFd control;
  /// Of a peer on this host.
  ProcessHandle process;
  /// The descriptors that a peer on this host passed, in its order.
  std::vector<UniqueFd> descriptors;
  /// TCP connections to a peer on another host: for point-to-point messages, and twice
  /// sockets_per_link for collectives if both are leaders of one number (host_layout.h).
  UniqueFd messages;
  std::vector<UniqueFd> collectives;
};

}  // namespace libddp
