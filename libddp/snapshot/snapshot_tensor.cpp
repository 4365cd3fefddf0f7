#include "libddp/snapshot/snapshot_tensor.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"

namespace libddp {
namespace {

struct Name {
  at::ScalarType dtype;
  std::string_view stored;
};

constexpr std::array kNames{
    Name{at::kDouble, "F64"},
    Name{at::kFloat, "F32"},
    Name{at::kHalf, "F16"},
    Name{at::kBFloat16, "BF16"},
    Name{at::kFloat8_e4m3fn, "F8_E4M3"},
    Name{at::kFloat8_e5m2, "F8_E5M2"},
    Name{at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    Name{at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
    Name{at::kFloat8_e8m0fnu, "F8_E8M0"},
    Name{at::kComplexHalf, "C32"},
    Name{at::kComplexFloat, "C64"},
    Name{at::kComplexDouble, "C128"},
    Name{at::kLong, "I64"},
    Name{at::kInt, "I32"},
    Name{at::kShort, "I16"},
    Name{at::kChar, "I8"},
    Name{at::kUInt64, "U64"},
    Name{at::kUInt32, "U32"},
    Name{at::kUInt16, "U16"},
    Name{at::kByte, "U8"},
    Name{at::kBool, "BOOL"},
};

}  // namespace

SnapshotTensor SnapshotTensor::whole(std::string key, at::Tensor tensor, StoredBy stored_by) {
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  const std::int64_t count = tensor.numel();
  return {std::move(key), std::move(tensor), std::move(shape), 0, count, stored_by};
}

void SnapshotTensor::check() const {
  const auto refuse = [&](const std::string& why, const char* hint) {
    throw ArgumentError(
        fmt::format("libddp snapshot: '{}' {}. Hint: {}.", printable(key), why, hint));
  };
  if (!tensor.defined()) refuse("is an undefined tensor", "leave it out");
  if (tensor.layout() != at::kStrided || tensor.is_meta() || tensor.is_quantized()) {
    refuse(fmt::format("is a {} tensor{}", c10::str(tensor.layout()),
                       tensor.is_meta() ? " without memory (meta)" : ""),
           "keep a dense tensor with memory in its place");
  }
  if (stored_dtype(tensor.scalar_type()).empty()) {
    refuse(fmt::format("has the dtype {}, which safetensors has no name for",
                       c10::toString(tensor.scalar_type())),
           "convert it before it is saved");
  }
  if (tensor.numel() != end - begin) {
    refuse(fmt::format("has {} elements for the range {} to {}", tensor.numel(), begin, end),
           "give the range that the tensor holds");
  }
}

std::string_view stored_dtype(at::ScalarType dtype) {
  for (const Name& name : kNames) {
    if (name.dtype == dtype) return name.stored;
  }
  return {};
}

at::ScalarType scalar_type_of(std::string_view stored_dtype) {
  for (const Name& name : kNames) {
    if (name.stored == stored_dtype) return name.dtype;
  }
  throw SnapshotError(
      fmt::format("libddp snapshot: torch has no dtype {}.", printable(std::string(stored_dtype))));
}

}  // namespace libddp
