#pragma once

// Work on many chunks by a few threads. Thread rule: any thread.
//
//   for_each_chunk(count, 4, [&](std::size_t index) { ... });

#include <cstddef>
#include <functional>

namespace libddp {

/// Calls `work` once for each number below `count`, by `num_threads` threads of which this is one.
/// The first exception ends it and is thrown here.
void for_each_chunk(std::size_t count, int num_threads,
                    const std::function<void(std::size_t)>& work);

}  // namespace libddp
