#pragma once

// Brings the ranks of a group together: memory, bootstrap, communicator, backend. Registers the
// host backend for CPU tensors. Thread rule: blocking; one call at a time per store.
//
//   std::unique_ptr<Backend> backend = create_host_backend({store, "libddp/world/", options});

#include <memory>

#include "libddp/group/backend_registry.h"

namespace libddp {

/// Returns when all ranks have met and can reach each other, by memory or by network; from then on
/// nobody needs the store, and its keys are gone. Ends at once where a group that lives over this
/// store loses a rank that both need.
std::unique_ptr<Backend> create_host_backend(const BackendRequest& request);

}  // namespace libddp
