#pragma once

// Shared memory in forked children: theirs to read, private to write.
//
// A child of fork() inherits the mappings of the arena, where gradients and parameters of all ranks
// of the host stand. What it wrote there, every rank would have. As with ordinary memory after a
// fork, its writes now stay its own: in the child the mapping becomes a private one of the same
// memory at the same address. It reads what the ranks write later, until it writes to that page.
// Where the kernel gives no private mapping (strict overcommit), the memory is read-only there.
// Thread rule: any thread, no locks; the handler of fork() makes system calls only.
//
//   make_private_in_children(segment);
//   forget_mapping(segment.data());      // SharedSegment does, before it unmaps

#include <cstddef>

#include "libddp/memory/shared_segment.h"

namespace libddp {

/// `segment` may be moved afterwards. Of more than 4,096 segments the rest stay as they are.
void make_private_in_children(const SharedSegment& segment);
/// Does nothing for what was not told.
void forget_mapping(const std::byte* data);

}  // namespace libddp
