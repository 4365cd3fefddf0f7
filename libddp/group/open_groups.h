#pragma once

// The groups of this process that somebody holds, so that all of them can be left at once.
// Thread rule: any thread.
//
//   return opened(group);                       // where one is made
//   for (const Group& group : open_groups()) group->abort("...");

#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// `group`, which is among the open ones until nobody holds it.
Group opened(Group group);

std::vector<Group> open_groups();

}  // namespace libddp
