#include "libddp/base/dtype.h"

#include "libddp/base/check.h"

namespace libddp {

std::size_t element_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float64:
    case Dtype::Int64:
      return 8;
    case Dtype::Float32:
    case Dtype::Int32:
      return 4;
    case Dtype::BFloat16:
    case Dtype::Float16:
    case Dtype::Int16:
      return 2;
    case Dtype::Int8:
    case Dtype::UInt8:
    case Dtype::Bool:
    case Dtype::Float8E4M3:
    case Dtype::Float8E5M2:
      return 1;
  }
  check_failed("known dtype", __FILE__, __LINE__, std::to_string(static_cast<int>(dtype)));
}

std::string_view name(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float32:
      return "float32";
    case Dtype::Float64:
      return "float64";
    case Dtype::BFloat16:
      return "bfloat16";
    case Dtype::Float16:
      return "float16";
    case Dtype::Int8:
      return "int8";
    case Dtype::UInt8:
      return "uint8";
    case Dtype::Int16:
      return "int16";
    case Dtype::Int32:
      return "int32";
    case Dtype::Int64:
      return "int64";
    case Dtype::Bool:
      return "bool";
    case Dtype::Float8E4M3:
      return "float8_e4m3fn";
    case Dtype::Float8E5M2:
      return "float8_e5m2";
  }
  check_failed("known dtype", __FILE__, __LINE__, std::to_string(static_cast<int>(dtype)));
}

}  // namespace libddp
