#pragma once

// Element types of the byte-level rooms, which know no tensors.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace libddp {

enum class Dtype : std::uint8_t {
  Float32,
  Float64,
  BFloat16,
  Float16,
  Int8,
  UInt8,
  Int16,
  Int32,
  Int64,
  Bool,
  /// Only accelerators reduce 8-bit floats.
  Float8E4M3,
  Float8E5M2,
};

/// The last one, for bytes that others sent.
constexpr Dtype kLastDtype = Dtype::Float8E5M2;

constexpr bool is_float8(Dtype dtype) {
  return dtype == Dtype::Float8E4M3 || dtype == Dtype::Float8E5M2;
}

/// Bytes of one element.
std::size_t element_bytes(Dtype dtype);

/// torch's spelling: "float32", "bfloat16", "bool".
std::string_view name(Dtype dtype);

}  // namespace libddp
