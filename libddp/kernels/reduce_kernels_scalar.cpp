// Kernels for any CPU: 16-byte vectors of the compiler, fp16 conversions in integer arithmetic.

#include <bit>

#include "libddp/kernels/convert_lanes.h"
#include "libddp/kernels/reduce_lanes.h"
#include "libddp/kernels/reduce_table.h"

namespace libddp {
namespace {

float widen_one(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1Fu;
  const std::uint32_t mantissa = half & 0x3FFu;
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13 | quiet);
  }
  if (exponent == 0) {
    // Subnormal: mantissa * 2^-24 is exact in fp32.
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

std::uint16_t narrow_one(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t result = 0;
  if (magnitude > 0x7F800000u) {
    result = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= 0x477FF000u) {
    result = 0x7C00u;  // 65520 and more round to infinity
  } else if (magnitude >= 0x38800000u) {
    const std::uint32_t rebased = magnitude - 0x38000000u;
    result = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
  } else {
    // Below 2^-14: the last bit of 0.5f is worth 2^-24, so the addition rounds to a subnormal.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    result = std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u;
  }
  return static_cast<std::uint16_t>(sign | result);
}

struct Isa {
  static constexpr int kVectorBytes = 16;
  static constexpr bool kStreams = false;
  static constexpr int kFloats = 4;
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
    for (int i = 0; i < kFloats; ++i) (*to)[i] = widen_one(from[i]);
  }
  static void narrow(Floats from, std::uint16_t* to) {
    for (int i = 0; i < kFloats; ++i) to[i] = narrow_one(from[i]);
  }
};

}  // namespace

KernelTable scalar_kernels() {
  return {.find = find_kernel<Isa>,
          .stream = nullptr,
          .copy = copy_vectors<Isa>,
          .narrow = narrow_floats<Isa>,
          .widen = widen_floats<Isa>};
}

}  // namespace libddp
