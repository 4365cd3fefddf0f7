#pragma once

// How the ranks of a communicator find each other: the ids of NCCL travel through the group's
// store, sealed where the run has a key, and no rank asks NCCL to come together before all are
// there. NCCL's own wait for a rank that does not come has no end and no name.
//
// Keys begin with `name`, which no other communicator of the group has.
// Thread rule: one call for each communicator; a collective of its ranks.
//
//   const std::vector<ncclUniqueId> ids = meet(api, store, {"0/", 0, 2, where}, deadline);

#include <nccl.h>

#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/cuda/nccl_api.h"

namespace libddp {

struct NcclMeeting {
  /// Begins the keys: "nccl/0/".
  std::string name;
  int rank = 0;
  int world_size = 1;
  /// "libddp[group world, rank 0/2] join": begins errors.
  std::string where;
};

/// The ids of all roots, one for up to 128 ranks. Throws TimeoutError naming the ranks that have
/// not come.
std::vector<ncclUniqueId> meet(const NcclApi& api, KeyValueStore& store, const NcclMeeting& meeting,
                               Deadline deadline);

}  // namespace libddp
