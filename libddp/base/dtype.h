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
};

/// Bytes of one element.
std::size_t element_bytes(Dtype dtype);

/// torch's spelling: "float32", "bfloat16", "bool".
std::string_view name(Dtype dtype);

}  // namespace libddp
