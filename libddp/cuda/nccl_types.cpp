#include "libddp/cuda/nccl_types.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>

#include <optional>

#include "libddp/cuda/device_facts.h"

namespace libddp {
namespace {

std::optional<ncclDataType_t> reduced_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float32:
      return ncclFloat32;
    case Dtype::Float64:
      return ncclFloat64;
    case Dtype::BFloat16:
      return ncclBfloat16;
    case Dtype::Float16:
      return ncclFloat16;
    case Dtype::Int8:
      return ncclInt8;
    case Dtype::UInt8:
    case Dtype::Bool:
      return ncclUint8;
    case Dtype::Int32:
      return ncclInt32;
    case Dtype::Int64:
      return ncclInt64;
    case Dtype::Float8E4M3:
      return ncclFloat8e4m3;
    case Dtype::Float8E5M2:
      return ncclFloat8e5m2;
    case Dtype::Int16:
      break;
  }
  return std::nullopt;
}

std::optional<ncclRedOp_t> plain_op(ReduceOp op, Dtype dtype) {
  // Sums and products of truth values are "any" and "all".
  const bool is_bool = dtype == Dtype::Bool;
  switch (op) {
    case ReduceOp::Sum:
      return is_bool ? ncclMax : ncclSum;
    case ReduceOp::Avg:
      return ncclAvg;
    case ReduceOp::Product:
      return is_bool ? ncclMin : ncclProd;
    case ReduceOp::Min:
      return ncclMin;
    case ReduceOp::Max:
      return ncclMax;
    case ReduceOp::Band:
      return is_bool ? std::optional(ncclMin) : std::nullopt;
    case ReduceOp::Bor:
      return is_bool ? std::optional(ncclMax) : std::nullopt;
    case ReduceOp::Bxor:
      break;
  }
  return std::nullopt;
}

/// Compute capability of the first devices that add 8-bit floats.
constexpr int kFloat8Capability = 90;

std::string float8_refusal(const NcclApi& api, const OpDescription& description, double scale,
                           c10::Device device) {
  constexpr const char* kHint = "Hint: reduce it as bfloat16; every dtype is moved";
  if (api.version < NcclApi::kFloat8Version) {
    return fmt::format("NCCL {} does not reduce {}, which needs {}. {}",
                       NcclApi::version_text(api.version), name(description.dtype),
                       NcclApi::version_text(NcclApi::kFloat8Version), kHint);
  }
  const int capability = compute_capability(device).value_or(kFloat8Capability);
  if (capability < kFloat8Capability) {
    return fmt::format("NCCL reduces {} from sm_{} on, and {} has sm_{}. {}",
                       name(description.dtype), kFloat8Capability, device.str(), capability, kHint);
  }
  // The factor would be rounded to 8 bits, too.
  if (scale == 1.0) return {};
  return fmt::format("NCCL does not scale {} (scale={}). {}", name(description.dtype), scale,
                     kHint);
}

}  // namespace

NcclElements nccl_elements(Dtype dtype, std::size_t count) {
  // NCCL before 2.24 does not know 8-bit floats.
  const auto same = is_float8(dtype) ? std::nullopt : reduced_dtype(dtype);
  if (same) return {*same, count};
  return {ncclUint8, count * element_bytes(dtype)};
}

std::string nccl_refusal(const NcclApi& api, const OpDescription& description, double scale,
                         c10::Device device) {
  if (is_float8(description.dtype)) {
    const std::string refusal = float8_refusal(api, description, scale, device);
    if (!refusal.empty()) return refusal;
  }
  if (!reduced_dtype(description.dtype)) {
    return fmt::format("NCCL does not reduce {}. Hint: use int32, or move the tensor to the CPU",
                       name(description.dtype));
  }
  if (!plain_op(description.reduce_op, description.dtype)) {
    return fmt::format(
        "NCCL has no {} reduction. Hint: move the tensor to the CPU for that, or use SUM, AVG, "
        "PRODUCT, MIN or MAX",
        name(description.reduce_op));
  }
  return {};
}

double scale_left(ReduceOp op, double scale) {
  return op == ReduceOp::Sum || op == ReduceOp::Avg ? 1.0 : scale;
}

NcclReduction::NcclReduction(const NcclApi& api, ncclComm_t comm, const OpDescription& description,
                             double scale, int world_size)
    : api_(api),
      comm_(comm),
      dtype_(reduced_dtype(description.dtype).value()),
      op_(plain_op(description.reduce_op, description.dtype).value()) {
  if (scale == 1.0) return;
  if (description.reduce_op == ReduceOp::Sum) make_scaled_sum(scale);
  if (description.reduce_op == ReduceOp::Avg) make_scaled_sum(scale / world_size);
}

NcclReduction::~NcclReduction() {
  if (is_made_) api_.red_op_destroy(op_, comm_);
}

void NcclReduction::make_scaled_sum(double scale) {
  // NCCL reads the factor in the dtype of the data, before the call returns.
  double as_double = scale;
  auto as_float = static_cast<float>(scale);
  c10::Half as_half(as_float);
  c10::BFloat16 as_bfloat16(as_float);
  void* factor = &as_float;
  if (dtype_ == ncclFloat64) factor = &as_double;
  if (dtype_ == ncclFloat16) factor = &as_half;
  if (dtype_ == ncclBfloat16) factor = &as_bfloat16;
  check_nccl(api_,
             api_.red_op_create_pre_mul_sum(&op_, factor, dtype_, ncclScalarHostImmediate, comm_),
             comm_, "libddp: a scaled sum");
  is_made_ = true;
}

}  // namespace libddp
