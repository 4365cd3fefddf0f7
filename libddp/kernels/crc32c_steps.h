#pragma once

// What the files of the instruction sets share: one table of functions each, and the loop over
// single words and bytes. Everything here works on states (crc32c_polynomial.h), not on checksums.
// Thread rule: free functions; any thread.
//
//   struct Isa { static std::uint32_t step(std::uint32_t state, std::uint64_t word); ... };
//   state = crc32c_rest<Isa, Crc32cSink::Cached>({to, from, size}, state);

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "libddp/base/cache_line.h"

namespace libddp {

/// `to` means nothing where nothing is copied.
struct Crc32cRange {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t size = 0;
};

/// Where the bytes go that have been summed up.
enum class Crc32cSink { Nowhere, Cached, Streamed };

using Crc32cKernel = std::uint32_t (*)(Crc32cRange range, std::uint32_t state);

struct Crc32cTable {
  /// Null where the build has no code for the instruction set.
  Crc32cKernel sum = nullptr;
  Crc32cKernel copy = nullptr;
  /// Copies past the caches, and fences; `copy` where there is no such store.
  Crc32cKernel stream = nullptr;
};

Crc32cTable scalar_crc32c();
Crc32cTable sse42_crc32c();
Crc32cTable vpclmul_crc32c();

/// Skips `size` bytes.
template <class Isa, Crc32cSink kSink>
void crc32c_advance(Crc32cRange* range, std::size_t size) {
  if constexpr (kSink != Crc32cSink::Nowhere) range->to += size;
  range->from += size;
  range->size -= size;
}

/// A word or byte that the compiler cannot read twice: it does not know that the register still
/// equals the memory.
template <class Isa, class Value>
Value crc32c_load(const std::byte* from) {
  Value value;
  std::memcpy(&value, from, sizeof(value));
  asm volatile("" : "+r"(value));
  return value;
}

template <class Isa, Crc32cSink kSink, class Value>
std::uint32_t crc32c_take(Crc32cRange* range, std::uint32_t state) {
  const Value value = crc32c_load<Isa, Value>(range->from);
  if constexpr (kSink != Crc32cSink::Nowhere) std::memcpy(range->to, &value, sizeof(value));
  crc32c_advance<Isa, kSink>(range, sizeof(value));
  return Isa::step(state, value);
}

/// What is too short or too crooked for anything better. Isa is a local type of each file, so that
/// no other file's instructions end up in its copy of this function.
template <class Isa, Crc32cSink kSink>
std::uint32_t crc32c_rest(Crc32cRange range, std::uint32_t state) {
  static_assert(std::endian::native == std::endian::little);
  while (range.size >= sizeof(std::uint64_t)) {
    state = crc32c_take<Isa, kSink, std::uint64_t>(&range, state);
  }
  while (range.size > 0) state = crc32c_take<Isa, kSink, std::uint8_t>(&range, state);
  return state;
}

/// The bytes before the first cache line of the copy, for stores that go past the caches.
template <class Isa>
std::uint32_t crc32c_head(Crc32cRange* range, std::uint32_t state) {
  const std::size_t past = reinterpret_cast<std::uintptr_t>(range->to) % kCacheLineBytes;
  const std::size_t size = std::min(range->size, (kCacheLineBytes - past) % kCacheLineBytes);
  state = crc32c_rest<Isa, Crc32cSink::Cached>({range->to, range->from, size}, state);
  crc32c_advance<Isa, Crc32cSink::Streamed>(range, size);
  return state;
}

}  // namespace libddp
