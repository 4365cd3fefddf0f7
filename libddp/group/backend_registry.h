#pragma once

// Which backend a group gets: each registers itself for the device whose tensors it moves, when the
// library is loaded.
// Thread rule: any thread.
//
//   const BackendRegistration host(c10::kCPU, &create_host_backend);
//   std::unique_ptr<Backend> backend = create_backend(c10::kCPU, {store, "libddp/world/",
//   options});

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/group/backend.h"
#include "libddp/group/process_group.h"

namespace libddp {

/// What a backend is made from.
struct BackendRequest {
  /// Shared by all ranks of the group.
  c10::intrusive_ptr<c10d::Store> store;
  /// Of the keys that belong to this group alone.
  std::string prefix;
  /// `global_ranks` is filled.
  const ProcessGroup::Options& options;
  /// The group's backend for CPU tensors, which outlives this one and whose ranks watch each other:
  /// who fails here tells it, and who fails there has failed here. Null for that one itself.
  Backend* host = nullptr;
};

/// Blocks until all ranks have come, or throws, latest at the timeout of the options.
using BackendFactory = std::unique_ptr<Backend> (*)(const BackendRequest& request);

struct BackendRegistration {
  /// REQUIRES: no other one for `device`.
  BackendRegistration(c10::DeviceType device, BackendFactory factory);
};

/// Whether this build has a backend for `device`.
bool has_backend(c10::DeviceType device);
/// Throws ArgumentError where nothing is registered for `device`.
std::unique_ptr<Backend> create_backend(c10::DeviceType device, const BackendRequest& request);

}  // namespace libddp
