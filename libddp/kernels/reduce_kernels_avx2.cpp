// Kernels for AVX2 with F16C: 32-byte vectors.

#include "libddp/kernels/reduce_table.h"

#if defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

#include "libddp/kernels/convert_lanes.h"
#include "libddp/kernels/reduce_lanes.h"

namespace libddp {
namespace {

struct Isa {
  static constexpr int kVectorBytes = 32;
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
  static void widen(const std::uint16_t* from, Floats* to) {
    *to = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void narrow(Floats from, std::uint16_t* to) {
    const __m128i packed = _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
  template <std::size_t kBytes>
  static void stream_vector(void* to, const void* from) {
    if constexpr (kBytes == sizeof(__m256i)) {
      _mm256_stream_si256(static_cast<__m256i*>(to),
                          _mm256_loadu_si256(static_cast<const __m256i*>(from)));
    } else {
      static_assert(kBytes == sizeof(__m128i));
      _mm_stream_si128(static_cast<__m128i*>(to),
                       _mm_loadu_si128(static_cast<const __m128i*>(from)));
    }
  }
  static void fence() { _mm_sfence(); }
};

void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += sizeof(__m256i)) {
    Isa::stream_vector<sizeof(__m256i)>(to + i, from + i);
  }
  Isa::fence();
}

}  // namespace

KernelTable avx2_kernels() {
  return {.find = find_kernel<Isa>,
          .stream = stream,
          .copy = copy_vectors<Isa>,
          .narrow = narrow_floats<Isa>,
          .widen = widen_floats<Isa>};
}

}  // namespace libddp

#else

namespace libddp {

KernelTable avx2_kernels() { return {}; }

}  // namespace libddp

#endif
