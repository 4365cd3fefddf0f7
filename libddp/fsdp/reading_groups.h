#pragma once

// The groups whose ranks read each other's blocks of a model's parameters, where these exist once
// for all ranks. Units may be sharded over different groups (experts, FSDP inside of HSDP), so that
// a rank that is through with one of them may still be read by another's ranks.
//
//   for (const Group& group : reading_groups(units)) group->barrier();
//
// Thread rule: free functions; the second is a collective.

#include <memory>
#include <vector>

#include "libddp/fsdp/param_group.h"
#include "libddp/group/process_group.h"

namespace libddp {

/// Each once, in the order of the units; none whose ranks are all in another one. Empty where
/// nothing is read by others.
std::vector<Group> reading_groups(const std::vector<std::shared_ptr<ParamGroup>>& units);

/// Nobody goes on before all have come that read something of this rank, or it of them.
void meet_readers(const std::vector<std::shared_ptr<ParamGroup>>& units,
                  const CallOptions& options);

}  // namespace libddp
