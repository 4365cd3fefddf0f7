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
/// The same for a part of a copy of `whole_bytes`, which go past the caches if they are many.
void copy_part(void* to, const void* from, std::size_t bytes, std::size_t whole_bytes);

/// From this size on, what is written goes past the caches.
inline constexpr std::size_t kStreamBytes = 4u << 20;

}  // namespace libddp
