#pragma once

// FNV-1a: short, the same in every process and build, and no secret.
// Thread rule: free function.
//
//   std::uint64_t hash = fnv1a("a");
//   hash = fnv1a("b", hash);      // as of "ab"

#include <cstdint>
#include <string_view>

namespace libddp {

inline constexpr std::uint64_t kFnvBegin = 0xcbf29ce484222325u;

constexpr std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = kFnvBegin) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace libddp
