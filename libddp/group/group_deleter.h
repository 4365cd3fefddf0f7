#pragma once

// How the last reference to a group frees it. A group's end joins threads, and one of them may be
// about to free a tensor that the embedding program knows, for which it needs a lock of that
// program: the deleter gives the lock up meanwhile.
//
// Thread rule: any thread; the deleter runs in the thread that drops the last reference.
//
//   set_group_deleter([](ProcessGroup* group) { Unlocked meanwhile; delete group; });

#include "libddp/group/process_group.h"

namespace libddp {

using GroupDeleter = void (*)(ProcessGroup*);

/// For all groups of the process, those that exist included; nullptr for plain `delete`. Returns
/// the one before.
GroupDeleter set_group_deleter(GroupDeleter deleter);

/// What the groups' pointers call.
void delete_as_installed(ProcessGroup* group) noexcept;

}  // namespace libddp
