// CRC-32C for any CPU: tables for eight bytes at once, or ARM's instruction where the build allows
// it. Source: M. E. Kounavis, F. L. Berry, A systematic approach to building high performance
// software-based CRC generators (slicing-by-8).

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

#include <array>

#include "libddp/kernels/crc32c_polynomial.h"
#include "libddp/kernels/crc32c_steps.h"

namespace libddp {
namespace {

#if defined(__ARM_FEATURE_CRC32)

struct CrcScalar {
  static std::uint32_t step(std::uint32_t state, std::uint8_t value) {
    return __crc32cb(state, value);
  }
  static std::uint32_t step(std::uint32_t state, std::uint64_t value) {
    return __crc32cd(state, value);
  }
};

#else

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[n][byte]: the state of 0 after the byte and n zeros.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t state = byte;
    for (auto& table : tables) {
      for (int bit = 0; bit < 8; ++bit) state = crc32c_polynomial::times_x(state);
      table[byte] = state;
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

struct CrcScalar {
  static std::uint32_t step(std::uint32_t state, std::uint8_t value) {
    return kTables[0][(state ^ value) & 0xFFu] ^ state >> 8;
  }
  static std::uint32_t step(std::uint32_t state, std::uint64_t value) {
    value ^= state;
    std::uint32_t result = 0;
    for (int i = 0; i < 8; ++i) result ^= kTables[7 - i][value >> 8 * i & 0xFFu];
    return result;
  }
};

#endif

}  // namespace

Crc32cTable scalar_crc32c() {
  return {.sum = crc32c_rest<CrcScalar, Crc32cSink::Nowhere>,
          .copy = crc32c_rest<CrcScalar, Crc32cSink::Cached>,
          .stream = crc32c_rest<CrcScalar, Crc32cSink::Cached>};
}

}  // namespace libddp
