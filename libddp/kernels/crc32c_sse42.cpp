// CRC-32C with SSE4.2's instruction and PCLMULQDQ. The instruction takes eight bytes, one in each
// cycle, but answers after three: three lanes, each over a third of a block, keep it busy.
// Source: V. Gopal et al., Fast CRC computation for iSCSI polynomial using CRC32 instruction
// (Intel).

#include "libddp/kernels/crc32c_steps.h"

#if defined(__SSE4_2__) && defined(__PCLMUL__)

#include <immintrin.h>

#include "libddp/kernels/crc32c_polynomial.h"

namespace libddp {
namespace {

struct Isa {
  static std::uint32_t step(std::uint32_t state, std::uint8_t value) {
    return _mm_crc32_u8(state, value);
  }
  static std::uint32_t step(std::uint32_t state, std::uint64_t value) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(state, value));
  }
};

// The state after kBytes zeros. The product of two reflected values is short of one x, and the
// instruction multiplies by x^32: x^33 in all.
template <std::size_t kBytes>
std::uint32_t after_zeros(std::uint32_t state) {
  constexpr std::uint32_t kFactor = crc32c_polynomial::power_of_x(8 * kBytes - 33);
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(state)),
                                               _mm_cvtsi32_si128(static_cast<int>(kFactor)), 0);
  return Isa::step(0u, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

template <Crc32cSink kSink>
std::uint32_t take_vector(const Crc32cRange& range, std::size_t offset, std::uint32_t state) {
  __m128i vector = _mm_loadu_si128(reinterpret_cast<const __m128i*>(range.from + offset));
  asm volatile("" : "+x"(vector));  // as in crc32c_load
  if constexpr (kSink == Crc32cSink::Cached) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(range.to + offset), vector);
  }
  if constexpr (kSink == Crc32cSink::Streamed) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(range.to + offset), vector);
  }
  state = Isa::step(state, static_cast<std::uint64_t>(_mm_cvtsi128_si64(vector)));
  return Isa::step(state, static_cast<std::uint64_t>(_mm_extract_epi64(vector, 1)));
}

// Short lanes: three far places at once are more than the prefetchers of the CPU and its buffers
// for stores past the caches can follow (128 bytes: 17 GB/s from memory to memory, 2 KiB: 9).
constexpr std::size_t kLaneBytes = 128;

template <Crc32cSink kSink>
std::uint32_t run(Crc32cRange range, std::uint32_t state) {
  while (range.size >= 3 * kLaneBytes) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += sizeof(__m128i)) {
      state = take_vector<kSink>(range, i, state);
      second = take_vector<kSink>(range, i + kLaneBytes, second);
      third = take_vector<kSink>(range, i + 2 * kLaneBytes, third);
    }
    state = after_zeros<2 * kLaneBytes>(state) ^ after_zeros<kLaneBytes>(second) ^ third;
    crc32c_advance<Isa, kSink>(&range, 3 * kLaneBytes);
  }
  return crc32c_rest<Isa, kSink>(range, state);
}

std::uint32_t stream(Crc32cRange range, std::uint32_t state) {
  state = crc32c_head<Isa>(&range, state);
  state = run<Crc32cSink::Streamed>(range, state);
  _mm_sfence();
  return state;
}

}  // namespace

Crc32cTable sse42_crc32c() {
  return {.sum = run<Crc32cSink::Nowhere>, .copy = run<Crc32cSink::Cached>, .stream = stream};
}

}  // namespace libddp

#else

namespace libddp {

Crc32cTable sse42_crc32c() { return {}; }

}  // namespace libddp

#endif
