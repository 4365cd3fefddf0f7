#pragma once

// From an InterEngine to the stage between hosts of one group.
// Thread rule: free function; the maker is called once, by the thread that makes the group.
//
//   assembly.make_stage = stage_maker(identity, hints, deadline, timeout);

#include <chrono>

#include "libddp/base/deadline.h"
#include "libddp/base/group_identity.h"
#include "libddp/collectives/hosts_mesh.h"
#include "libddp/group/meeting_place.h"

namespace libddp {

/// Empty if `hints` has no engine. `hints` must outlive the maker; the engine has what is left of
/// `deadline` to join, `timeout` at most.
InterStageMaker stage_maker(const GroupIdentity& identity, const MeetingHints& hints,
                            Deadline deadline, std::chrono::milliseconds timeout);

}  // namespace libddp
