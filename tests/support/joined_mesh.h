#pragma once

// A mesh of real processes: each rank makes its own arena and page and meets the others over a
// store, as a process group does.
//
//   FolderStore store;
//   fork_ranks(2, [&](int rank) { JoinedMesh joined = join_mesh(store, rank, 2); ... });

#include <memory>
#include <string>
#include <vector>

#include "libddp/bootstrap/key_value_store.h"
#include "libddp/bootstrap/meeting.h"
#include "libddp/collectives/host_mesh.h"
#include "libddp/memory/arena.h"

namespace libddp::test {

struct JoinedMesh {
  std::shared_ptr<Arena> arena;
  /// Keeps the control sockets open.
  std::vector<GroupPeer> peers;
  std::unique_ptr<HostMesh> mesh;
};

/// Blocks until all ranks have met. `cpu_mask`: what this rank tells about its CPUs.
JoinedMesh join_mesh(KeyValueStore& store, int rank, int world_size,
                     const std::string& cpu_mask = HostMesh::own_cpu_mask());

}  // namespace libddp::test
