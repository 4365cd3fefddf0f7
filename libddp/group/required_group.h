#pragma once

// The check of a group as an argument: split() gives null on ranks that are not in the part.
// Thread rule: free function.
//
//   group_ = required_group(std::move(group), "DistributedDataParallel");

#include "libddp/group/process_group.h"

namespace libddp {

/// `group`, of which there must be one. `who`: whose argument, for the ArgumentError.
Group required_group(Group group, const char* who);

}  // namespace libddp
