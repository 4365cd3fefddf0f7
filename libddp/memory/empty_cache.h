#pragma once

// Gives freed memory of this process's arenas back to the system, which keep its pages for the next
// blocks otherwise (256 MiB per arena at most): for the moment when what was freed is not what will
// be asked for next.
//
// Blocks in use keep their bytes, in every process that maps them. Memory that is used again later
// costs its page faults again. Freed ranges smaller than 64 KiB stay. In a child of fork() only
// arenas that the child has made are emptied.
// Thread rule: any thread.
//
//   old_buckets = {};
//   new_buckets = build();
//   empty_cache();

namespace libddp {

void empty_cache();

}  // namespace libddp
