#pragma once

// Arithmetic modulo the polynomial of CRC-32C, at compile time and for crc32c_combine.
//
// Polynomials over bits, reflected: bit 31 of a value is the coefficient of x^0, bit 0 that of
// x^31. A checksum's `state` is the checksum with all bits inverted; n bytes of zeros multiply it
// by x^8n. Source: R. N. Williams, A painless guide to CRC error detection algorithms;
// madler/zlib:crc32.c. Thread rule: free functions; any thread.
//
//   state = multiply(state, power_of_x(8 * 4096));   // as 4096 zeros would

#include <cstdint>

namespace libddp::crc32c_polynomial {

/// x^32 modulo the polynomial.
inline constexpr std::uint32_t kPolynomial = 0x82F63B78u;
inline constexpr std::uint32_t kOne = 0x80000000u;

constexpr std::uint32_t times_x(std::uint32_t a) {
  return (a & 1u) != 0 ? a >> 1 ^ kPolynomial : a >> 1;
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & kOne) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  std::uint32_t power = kOne;
  std::uint32_t square = times_x(kOne);
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1u) != 0) power = multiply(power, square);
    square = multiply(square, square);
  }
  return power;
}

}  // namespace libddp::crc32c_polynomial
