// CRC-32C with VPCLMULQDQ on 64-byte vectors: the message is folded onto its own next bytes, four
// vectors at once, until 16 bytes are left that have the same remainder.
// Source: V. Gopal et al., Fast CRC computation for generic polynomials using PCLMULQDQ (Intel).

#include "libddp/kernels/crc32c_steps.h"

#if defined(__AVX512F__) && defined(__VPCLMULQDQ__)

#include <immintrin.h>

#include "libddp/kernels/crc32c_polynomial.h"

namespace libddp {
namespace {

constexpr std::size_t kVectorBytes = sizeof(__m512i);
constexpr std::size_t kBlockBytes = 4 * kVectorBytes;

struct Isa {
  static std::uint32_t step(std::uint32_t state, std::uint8_t value) {
    return _mm_crc32_u8(state, value);
  }
  static std::uint32_t step(std::uint32_t state, std::uint64_t value) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(state, value));
  }
};

// Factors that move 16 bytes kBytes ahead: for their first half (x^64 more) and for their second.
// As 64-bit reflected values they count x^32 more than they say, and the product of two such values
// is short of one x: 33 less in each exponent.
template <std::size_t kBytes>
struct Ahead {
  static constexpr long long kFirst = crc32c_polynomial::power_of_x(8 * kBytes + 64 - 33);
  static constexpr long long kSecond = crc32c_polynomial::power_of_x(8 * kBytes - 33);
};

template <std::size_t kBytes>
__m512i fold(__m512i folded, __m512i next) {
  using Factors = Ahead<kBytes>;
  const __m512i factors =
      _mm512_set_epi64(Factors::kSecond, Factors::kFirst, Factors::kSecond, Factors::kFirst,
                       Factors::kSecond, Factors::kFirst, Factors::kSecond, Factors::kFirst);
  const __m512i first = _mm512_clmulepi64_epi128(folded, factors, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(folded, factors, 0x11);
  return _mm512_ternarylogic_epi64(first, second, next, 0x96);  // exclusive or of all three
}

template <std::size_t kBytes>
__m128i fold(__m128i folded, __m128i next) {
  const __m128i factors = _mm_set_epi64x(Ahead<kBytes>::kSecond, Ahead<kBytes>::kFirst);
  const __m128i first = _mm_clmulepi64_si128(folded, factors, 0x00);
  const __m128i second = _mm_clmulepi64_si128(folded, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

// The state after the 64 bytes, whose first four carry the state before them.
std::uint32_t state_of(__m512i folded) {
  alignas(kVectorBytes) __m128i parts[4];
  _mm512_store_si512(parts, folded);
  const __m128i all = fold<16>(fold<16>(fold<16>(parts[0], parts[1]), parts[2]), parts[3]);
  const std::uint32_t half = Isa::step(0u, static_cast<std::uint64_t>(_mm_cvtsi128_si64(all)));
  return Isa::step(half, static_cast<std::uint64_t>(_mm_extract_epi64(all, 1)));
}

template <Crc32cSink kSink>
__m512i take_vector(const Crc32cRange& range, std::size_t offset) {
  __m512i vector = _mm512_loadu_si512(range.from + offset);
  asm volatile("" : "+v"(vector));  // as in crc32c_load
  if constexpr (kSink == Crc32cSink::Cached) _mm512_storeu_si512(range.to + offset, vector);
  if constexpr (kSink == Crc32cSink::Streamed) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(range.to + offset), vector);
  }
  return vector;
}

// Folds whole blocks, then merges the four vectors. REQUIRES a block at least.
template <Crc32cSink kSink>
__m512i take_blocks(Crc32cRange* range, std::uint32_t state) {
  const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
  __m512i a = _mm512_xor_si512(take_vector<kSink>(*range, 0), start);
  __m512i b = take_vector<kSink>(*range, kVectorBytes);
  __m512i c = take_vector<kSink>(*range, 2 * kVectorBytes);
  __m512i d = take_vector<kSink>(*range, 3 * kVectorBytes);
  crc32c_advance<Isa, kSink>(range, kBlockBytes);
  while (range->size >= kBlockBytes) {
    a = fold<kBlockBytes>(a, take_vector<kSink>(*range, 0));
    b = fold<kBlockBytes>(b, take_vector<kSink>(*range, kVectorBytes));
    c = fold<kBlockBytes>(c, take_vector<kSink>(*range, 2 * kVectorBytes));
    d = fold<kBlockBytes>(d, take_vector<kSink>(*range, 3 * kVectorBytes));
    crc32c_advance<Isa, kSink>(range, kBlockBytes);
  }
  return fold<kVectorBytes>(fold<kVectorBytes>(fold<kVectorBytes>(a, b), c), d);
}

template <Crc32cSink kSink>
std::uint32_t run(Crc32cRange range, std::uint32_t state) {
  if (range.size >= kBlockBytes) {
    __m512i folded = take_blocks<kSink>(&range, state);
    while (range.size >= kVectorBytes) {
      folded = fold<kVectorBytes>(folded, take_vector<kSink>(range, 0));
      crc32c_advance<Isa, kSink>(&range, kVectorBytes);
    }
    state = state_of(folded);
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

Crc32cTable vpclmul_crc32c() {
  return {.sum = run<Crc32cSink::Nowhere>, .copy = run<Crc32cSink::Cached>, .stream = stream};
}

}  // namespace libddp

#else

namespace libddp {

Crc32cTable vpclmul_crc32c() { return {}; }

}  // namespace libddp

#endif
