#pragma once

// Copies between ordinary and shared memory, at the speed of vector stores.
//
// The C library's memcpy turns to `rep movsb` at about 2 KiB where the CPU advertises it; on Zen 3
// and 4 that is up to ten times slower when source and destination are aligned differently. Copies
// that no cache can hold go past the caches.
// Thread rule: free function, any thread.
//
//   copy_bytes(page.staging_in(0), tensor, bytes);

#include <cstddef>

namespace libddp {

/// The ranges do not overlap, or are the same (then nothing happens). No bytes need no memory.
void copy_bytes(void* to, const void* from, std::size_t bytes);

}  // namespace libddp
