#pragma once

// The checks of what a group is made with.
//
// Thread rule: free functions.
//
//   check_options({identity, "create"}, options);   // throws ArgumentError

#include <vector>

#include "libddp/group/process_group.h"
#include "libddp/group/validation.h"

namespace libddp {

void check_options(const CallSite& site, const ProcessGroup::Options& options);
/// `ranks`, of the group that is cut, are members of a smaller one.
void check_part(const CallSite& site, const std::vector<int>& ranks);

/// 0 .. world_size - 1.
std::vector<int> all_ranks(int world_size);

}  // namespace libddp
