#pragma once

// Thread rule: constant.

#include <cstddef>

namespace libddp {

/// What a core takes from memory, and from another core, at once.
inline constexpr std::size_t kCacheLineBytes = 64;

}  // namespace libddp
