#pragma once

// How the ranks of a communicator find each other: the ids of NCCL travel through the group's
// store, sealed where the run has a key, and no rank asks NCCL to come together before all are
// there. NCCL's own wait for a rank that does not come has no end and no name. Nor do two ranks
// with one device get as far as NCCL: what it says of them names no rank.
//
// Keys begin with `name`, which no other communicator of the group has.
// Thread rule: one call for each communicator; a collective of its ranks.
//
//   const std::vector<ncclUniqueId> ids = meet(api, store, {"0/", 0, 2, device, where}, deadline);

#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/cuda/nccl_api.h"
#include "libddp/cuda/nccl_header.h"

namespace libddp {

/// Two ranks have one device. Thrown on all ranks.
class SharedDeviceError : public ArgumentError {
 public:
  using ArgumentError::ArgumentError;
};

struct NcclMeeting {
  /// Begins the keys: "nccl/0/".
  std::string name;
  int rank = 0;
  int world_size = 1;
  /// This rank's, which no other one may have (device_facts.h); "" = not looked at.
  std::string device_identity;
  /// "libddp[group world, rank 0/2] join": begins errors.
  std::string where;
};

/// The ids of all roots, one for up to 128 ranks. Throws TimeoutError naming the ranks that have
/// not come; SharedDeviceError.
std::vector<ncclUniqueId> meet(const NcclApi& api, KeyValueStore& store, const NcclMeeting& meeting,
                               Deadline deadline);

/// What to do about two ranks on one device.
std::string shared_device_hint(const NcclApi& api);
/// NCCL_MULTI_RANK_GPU_ENABLE=1, and an NCCL that knows it.
bool may_share_devices(const NcclApi& api);

}  // namespace libddp
