#pragma once

// What a communicator of the ranks of one host is made of.
//
//   ShmComm comm({.rank = 0, .world_size = 2, .group_name = "world", .arena = arena}, ...);

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "libddp/memory/arena.h"
#include "libddp/memory/shared_segment.h"

namespace libddp {

/// One rank as the communicator sees it. The communicator keeps the segments mapped.
struct ShmMember {
  /// Its number in the group, where the group spans several hosts; -1 = its place in the list.
  int group_rank = -1;
  pid_t pid = 0;
  std::string host;
  /// CPUs that this rank may run on, as text of the affinity mask; decides spinning.
  std::string cpu_mask;
  /// The rank's control page; for the own rank the one made by ShmComm::create_page.
  SharedSegment page;
  /// The rank's arena; empty for the own rank (see ShmCommOptions::arena).
  SharedSegment arena;
};

struct ShmCommOptions {
  /// Among the ranks of this host.
  int rank = 0;
  int world_size = 1;
  /// Ranks of the whole group, for messages; 0 = world_size.
  int group_size = 0;
  std::string group_name;
  std::shared_ptr<Arena> arena = nullptr;
  /// One per rank, ordered by rank.
  std::vector<ShmMember> members = {};
};

}  // namespace libddp
