#pragma once

// Communicators of several hosts in one process: the ranks are threads, their hosts only names, the
// connections between them go through this machine's own network.
//
//   run_hosts({0, 0, 1}, [](HostsRank& me) { me.comm->barrier(...); });   // host of each rank

#include <functional>
#include <memory>
#include <vector>

#include "libddp/bootstrap/bootstrap.h"
#include "libddp/collectives/comm.h"
#include "libddp/collectives/hierarchical_comm.h"
#include "libddp/memory/arena.h"
#include "libddp/transport/link_settings.h"

namespace libddp::test {

struct HostsRank {
  int rank = 0;
  int world_size = 0;
  std::shared_ptr<Arena> arena;
  /// Keeps the control connections open.
  std::vector<GroupPeer> peers;
  std::unique_ptr<Comm> comm;
};

/// Runs `f` on every rank as a thread and waits for all; rethrows the first exception.
void run_hosts(const std::vector<int>& host_of, const std::function<void(HostsRank&)>& f,
               const LinkSettings& link = {}, const InterStageMaker& make_stage = nullptr);

/// Runs the transfers of one rank to their end, as the group's message queue does.
void run_transfers(Comm& comm, std::vector<Comm::Transfer>& transfers);

}  // namespace libddp::test
