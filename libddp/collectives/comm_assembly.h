#pragma once

// Makes the communicator of a group from what a bootstrap brought: ShmComm if all ranks share a
// host, else HierarchicalComm. Thread rule: free functions.
//
//   const std::vector<int> passed = descriptors_of(page, *arena);
//   std::vector<GroupPeer> peers = bootstrap(store, options, passed, deadline);
//   std::unique_ptr<Comm> comm = assemble_comm({.rank = 0, .group_name = "world", ...}, peers);

#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/comm.h"
#include "libddp/collectives/hierarchical_comm.h"
#include "libddp/memory/arena.h"
#include "libddp/memory/shared_segment.h"
#include "libddp/transport/group_peer.h"

namespace libddp {

/// What a rank brings itself.
struct CommAssembly {
  int rank = 0;
  std::string group_name;
  std::shared_ptr<Arena> arena;
  /// Its own control page (ShmComm::create_page).
  SharedSegment page;
  LinkSettings link = {};
  /// What moves bytes between hosts; empty: TCP links.
  InterStageMaker make_stage = nullptr;
};

/// The descriptors that assemble_comm expects of each peer on this host.
std::vector<int> descriptors_of(const SharedSegment& page, const Arena& arena);

/// Takes descriptors and connections out of `peers`, all but `control` and `process`.
/// Throws PeerError if a peer passed something else.
std::unique_ptr<Comm> assemble_comm(CommAssembly own, std::vector<GroupPeer>& peers);

}  // namespace libddp
