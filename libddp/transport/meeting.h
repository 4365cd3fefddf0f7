#pragma once

// How the ranks of one host find each other and exchange descriptors.
//
// Each rank binds an abstract Unix socket (no file is left behind), publishes a card {rank, pid,
// host, boot id, socket name, world size} in the store, connects to every lower rank and accepts
// every higher one. Over each connection the two sides check uid and a random token from the card,
// then pass descriptors. The connection stays open: the kernel closes it when a process dies, which
// is how death is noticed at once.
//
// A rank that cannot take part writes its reason under "error" in the store, so that every rank
// fails with the same cause instead of a timeout.
// Errors: TimeoutError names the ranks that never came; PeerError two ranks with one number, world
// sizes that differ, a peer's failure; NetworkError a rank on another host (until the network stage
// exists).
// Thread rule: one call at a time per store prefix; blocking.

#include <sys/types.h>

#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/transport/key_value_store.h"

namespace libddp {

struct MeetingOptions {
  int rank = 0;
  int world_size = 1;
  std::string group_name{};
  /// Free text compared between all ranks; a difference is an error that shows both (library
  /// version, layout of the shared page).
  std::string agreement{};
  /// Free text handed to the peers (for example this rank's CPU affinity mask).
  std::string note{};
};

/// What a rank knows of another after the meeting. For the own rank: no descriptors.
struct LocalPeer {
  int rank = 0;
  pid_t pid = 0;
  std::string host;
  std::string note;
  /// Stream socket that lives as long as both processes.
  UniqueFd control;
  /// pidfd of the peer, where the kernel gives one.
  UniqueFd pidfd;
  /// The descriptors that the peer passed, in its order.
  std::vector<UniqueFd> descriptors;
};

/// Meets all other ranks and hands each of them `descriptors` (borrowed). One entry per rank,
/// ordered by rank, the own one included.
std::vector<LocalPeer> meet(KeyValueStore& store, const MeetingOptions& options,
                            const std::vector<int>& descriptors, Deadline deadline);

}  // namespace libddp
