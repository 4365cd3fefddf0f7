#pragma once

// Brings the ranks of a group together: memory, meeting, mesh, backend.
// Thread rule: blocking; one call at a time per store.
//
//   std::unique_ptr<Backend> backend = meet_ranks(store, {"world", 3, 8}, {}, timeout);

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/group_identity.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/group/backend.h"
#include "libddp/group/process_group.h"

namespace libddp {

/// What decides where a rank is and how others reach it; see MeetingOptions and
/// ProcessGroup::Options.
struct MeetingHints {
  std::string route_to{};
  std::string host_identity{};
  LinkOptions links{};
  bool require_key = false;
  /// See MeetingOptions.
  std::function<void()> look{};
  /// Moves collectives between hosts, if set; it meets over this store, under this prefix.
  InterEngine inter{};
  c10::intrusive_ptr<c10d::Store> inter_store{};
  std::string inter_prefix{};
};

/// Returns when all ranks have met and can reach each other, by memory or by network; from then on
/// nobody needs the store, and its keys are gone. `store` is this group's alone (a prefix).
std::unique_ptr<Backend> meet_ranks(KeyValueStore& store, const GroupIdentity& identity,
                                    const MeetingHints& hints, std::chrono::milliseconds timeout);

}  // namespace libddp
