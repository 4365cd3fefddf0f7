#include "tests/fakegpu/nccl_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

namespace mock_nccl {
namespace {

/// What a type is added in.
template <typename T>
using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <typename Function>
auto with_type(ncclDataType_t dtype, const Function& function) {
  switch (dtype) {
    case ncclInt8:
      return function(std::int8_t{});
    case ncclUint8:
      return function(std::uint8_t{});
    case ncclInt32:
      return function(std::int32_t{});
    case ncclUint32:
      return function(std::uint32_t{});
    case ncclInt64:
      return function(std::int64_t{});
    case ncclUint64:
      return function(std::uint64_t{});
    case ncclFloat16:
      return function(c10::Half{});
    case ncclFloat32:
      return function(float{});
    case ncclFloat64:
      return function(double{});
    case ncclBfloat16:
      return function(c10::BFloat16{});
    case ncclFloat8e4m3:
      return function(c10::Float8_e4m3fn{});
    case ncclFloat8e5m2:
      return function(c10::Float8_e5m2{});
    default:
      throw std::invalid_argument("mock NCCL: no such datatype");
  }
}

template <typename W>
W combined(W a, W b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<W>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<W>(a + b);
  }
}

}  // namespace

std::size_t size_of(ncclDataType_t dtype) {
  if (dtype < 0 || dtype >= ncclNumTypes) return 0;
  return with_type(dtype, [](auto element) { return sizeof(element); });
}

void reduce(const std::vector<const void*>& inputs, void* out, std::size_t count,
            ncclDataType_t dtype, ncclRedOp_t op) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    for (std::size_t i = 0; i < count; ++i) {
      W sum = static_cast<W>(static_cast<const T*>(inputs[0])[i]);
      for (std::size_t rank = 1; rank < inputs.size(); ++rank)
        sum = combined<W>(sum, static_cast<W>(static_cast<const T*>(inputs[rank])[i]), op);
      if (op == ncclAvg) sum = static_cast<W>(sum / static_cast<W>(inputs.size()));
      static_cast<T*>(out)[i] = static_cast<T>(sum);
    }
  });
}

void scale(void* data, std::size_t count, ncclDataType_t dtype, const void* scalar) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const auto factor = static_cast<W>(*static_cast<const T*>(scalar));
    for (std::size_t i = 0; i < count; ++i) {
      T& value = static_cast<T*>(data)[i];
      value = static_cast<T>(static_cast<W>(static_cast<W>(value) * factor));
    }
  });
}

}  // namespace mock_nccl
