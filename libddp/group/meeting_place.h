#pragma once

// Brings the ranks of a group together: memory, meeting, mesh, backend.
// Thread rule: blocking; one call at a time per store.
//
//   std::unique_ptr<Backend> backend = meet_on_host(store, {"world", 3, 8}, timeout);

#include <chrono>
#include <memory>

#include "libddp/group/backend.h"
#include "libddp/group/group_identity.h"
#include "libddp/transport/key_value_store.h"

namespace libddp {

/// Returns when all ranks have met and can reach each other's memory; from then on nobody needs
/// the store, and its keys are gone. `store` is this group's alone (a prefix).
std::unique_ptr<Backend> meet_on_host(KeyValueStore& store, const GroupIdentity& identity,
                                      std::chrono::milliseconds timeout);

}  // namespace libddp
