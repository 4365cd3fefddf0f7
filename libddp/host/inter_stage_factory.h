#pragma once

// Makes what moves the collectives of a group between hosts, in place of TCP links
// (docs/hosts.md); interop makes such stages over c10d backends.
// Thread rule: as the function that it is called from; one call per group and leader.
//
//   std::unique_ptr<InterStage> stage = factory->make(local, place, std::move(links), request);

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/group_identity.h"
#include "libddp/collectives/hierarchical_comm.h"

namespace libddp {

/// What a stage is made from.
struct InterStageRequest {
  const GroupIdentity& identity;
  /// Shared by all ranks of the group; keys of this group alone begin with `prefix`.
  c10::intrusive_ptr<c10d::Store> store;
  std::string prefix;
  /// This host's address on the network between the hosts.
  std::string address;
  /// The end of the group's creation, which takes `timeout` at most.
  Deadline deadline;
  std::chrono::milliseconds timeout{};
};

class InterStageFactory {
 public:
  virtual ~InterStageFactory() = default;

  /// On each leader, once in each group of several hosts. `links` is the stage over TCP, which the
  /// new one may use or drop; `local` outlives it.
  virtual std::unique_ptr<InterStage> make(ShmComm& local, InterPlace place,
                                           std::unique_ptr<InterStage> links,
                                           const InterStageRequest& request) const = 0;
};

}  // namespace libddp
