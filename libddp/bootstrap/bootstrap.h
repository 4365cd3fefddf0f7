#pragma once

// How the ranks of a group find each other, exchange descriptors with those of their host, and
// connect to those of other hosts.
//
// Each rank binds an abstract Unix socket (no file is left behind), publishes a description {rank,
// pid, host, boot id, socket name, world size} in the store, connects to every lower rank of its
// host and accepts every higher one. Over each connection the two sides check uid and a random
// token from the description, then pass descriptors. Ranks of other hosts are joined by TCP
// (link_bootstrap.h); ranks share a host if their boot ids (or LIBDDP_HOST_ID) and network
// namespaces are equal. The connections stay open: the kernel closes them when a process dies,
// which is how death is noticed at once.
//
// With a run key (run_key.h) only who has it is believed in the store and let in from other hosts;
// without one, ranks of several hosts start with a warning.
//
// A rank that cannot take part writes its reason under "error" in the store, so that every rank
// fails with the same cause instead of a timeout; `refuse_bootstrap` is for reasons that are known
// before the bootstrap begins.
// Errors: TimeoutError names the ranks that never came; PeerError two ranks with one number, world
// sizes that differ, a peer's failure; NetworkError hosts that cannot reach each other (both ends
// and the address are named); ArgumentError an interface that does not exist. Thread rule: one call
// at a time per store prefix; blocking.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/transport/group_peer.h"

namespace libddp {

class RunKey;

struct BootstrapOptions {
  int rank = 0;
  int world_size = 1;
  std::string group_name{};
  /// Free text compared between all ranks; a difference is an error that shows both (library
  /// version, layout of the shared page).
  std::string agreement{};
  /// Free text handed to the peers (for example this rank's CPU affinity mask).
  std::string note{};
  /// Host of the store, as a name or address: the own address is the one on the route to it.
  std::string route_to{};
  /// Connections per pair of leaders and kind of bytes, in a group of several hosts. Part of what
  /// the ranks must agree on.
  int sockets_per_link = 1;
  /// Whoever has it belongs to the run (run_key.h); null = whoever can read the store does.
  std::shared_ptr<const RunKey> key{};
  /// Several hosts without a key are an error instead of a warning.
  bool require_key = false;
  /// Called between the pieces of each wait; what it throws ends the bootstrap.
  std::function<void()> look{};
  /// Instead of boot id and network namespace: ranks with equal texts share a host. For tests.
  std::string host_identity{};
};

/// Meets all other ranks and hands those of this host `descriptors` (borrowed). One entry per rank,
/// ordered by rank, the own one included.
std::vector<GroupPeer> bootstrap(KeyValueStore& store, const BootstrapOptions& options,
                                 const std::vector<int>& descriptors, Deadline deadline);

/// Tells the others, who are in `meet` or will be, why this rank does not come. Of `options` it
/// needs rank, world size, name and key. Rank 0, with which the store may end, returns when all
/// others have heard it, or after 5 seconds.
void refuse_bootstrap(KeyValueStore& store, const BootstrapOptions& options,
                      const std::string& reason) noexcept;

}  // namespace libddp
