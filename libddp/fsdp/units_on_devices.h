#pragma once

// Which units of a model compute on a device, and the ranks that share them.
// Thread rule: free functions.
//
//   if (const Group ranks = device_ranks_of(units)) ranks->all_reduce(...);

#include <memory>
#include <vector>

#include "libddp/fsdp/param_group.h"
#include "libddp/group/process_group.h"

namespace libddp {

bool is_on_device(const ParamGroup& unit);
bool is_any_on_device(const std::vector<std::shared_ptr<ParamGroup>>& units);
/// Of the first unit on a device that has several; null: none has.
Group device_ranks_of(const std::vector<std::shared_ptr<ParamGroup>>& units);

}  // namespace libddp
