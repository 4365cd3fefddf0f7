#pragma once

// A communicator of real processes: each rank makes its own arena and page and meets the others
// over a store, as a process group does.
//
//   FolderStore store;
//   fork_ranks(2, [&](int rank) { JoinedComm joined = join_comm(store, rank, 2); ... });

#include <memory>
#include <string>
#include <vector>

#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/memory/arena.h"

namespace libddp::test {

struct JoinedComm {
  std::shared_ptr<Arena> arena;
  /// Keeps the control sockets open.
  std::vector<GroupPeer> peers;
  std::unique_ptr<ShmComm> comm;
};

/// Blocks until all ranks have met. `cpu_mask`: what this rank tells about its CPUs.
JoinedComm join_comm(KeyValueStore& store, int rank, int world_size,
                     const std::string& cpu_mask = ShmComm::own_cpu_mask());

}  // namespace libddp::test
