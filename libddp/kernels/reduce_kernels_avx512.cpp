// Kernels for AVX-512 (F, BW, VL, DQ): 64-byte vectors.

#include "libddp/kernels/reduce_table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)

#include <immintrin.h>

#include "libddp/kernels/convert_lanes.h"
#include "libddp/kernels/reduce_lanes.h"

namespace libddp {
namespace {

struct Isa {
  static constexpr int kVectorBytes = 64;
  static constexpr bool kStreams = true;
  typedef float Floats __attribute__((vector_size(kVectorBytes)));
  typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef std::uint16_t Packed __attribute__((vector_size(kVectorBytes / 2)));

  static void widen_bits(const std::uint16_t* from, Bits* to) {
    Packed packed;
    std::memcpy(&packed, from, sizeof(packed));
    *to = __builtin_convertvector(packed, Bits);
  }
  static void narrow_bits(Bits from, std::uint16_t* to) {
    const Packed packed = __builtin_convertvector(from, Packed);
    std::memcpy(to, &packed, sizeof(packed));
  }
  // The forms without a mask make g++ 12 warn about its own undefined register.
  static constexpr __mmask16 kAll = 0xFFFF;
  static void widen(const std::uint16_t* from, Floats* to) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    *to = (Floats)_mm512_maskz_cvtph_ps(kAll, packed);
  }
  static void narrow(Floats from, std::uint16_t* to) {
    const __m256i packed = _mm512_maskz_cvtps_ph(kAll, (__m512)from, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
  }
  template <std::size_t kBytes>
  static void stream_vector(void* to, const void* from) {
    if constexpr (kBytes == sizeof(__m512i)) {
      _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
    } else {
      static_assert(kBytes == sizeof(__m256i));
      _mm256_stream_si256(static_cast<__m256i*>(to),
                          _mm256_loadu_si256(static_cast<const __m256i*>(from)));
    }
  }
  static void fence() { _mm_sfence(); }
};

void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += sizeof(__m512i)) {
    Isa::stream_vector<sizeof(__m512i)>(to + i, from + i);
  }
  Isa::fence();
}

}  // namespace

KernelTable avx512_kernels() {
  return {.find = find_kernel<Isa>,
          .stream = stream,
          .copy = copy_vectors<Isa>,
          .narrow = narrow_floats<Isa>,
          .widen = widen_floats<Isa>};
}

}  // namespace libddp

#else

namespace libddp {

KernelTable avx512_kernels() { return {}; }

}  // namespace libddp

#endif
