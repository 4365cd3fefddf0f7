#pragma once

// libddp's dtypes and reductions as NCCL's.
//
// NCCL adds no 16-bit integers, 8-bit floats not in every version nor on every device, and knows no
// bitwise reductions: such calls are refused before anything is sent. What only moves bytes moves
// those of any dtype.
// Thread rule: pure, and NcclReduction belongs to one call.
//
//   const NcclReduction reduction(api, comm, description, scale, world_size);
//   api.all_reduce(in, out, count, reduction.dtype(), reduction.op(), comm, stream);

#include <c10/core/Device.h>

#include <string>

#include "libddp/base/op_description.h"
#include "libddp/cuda/nccl_api.h"
#include "libddp/cuda/nccl_header.h"

namespace libddp {

/// For operations that only move bytes: how many elements of which type stand for `count` of
/// `dtype`.
struct NcclElements {
  ncclDataType_t dtype = ncclUint8;
  std::size_t count = 0;
};
NcclElements nccl_elements(Dtype dtype, std::size_t count);

/// Why NCCL cannot reduce with that op in that dtype on `device`, and a hint: "NCCL does not reduce
/// int16. Hint: ..."; "" where it can.
std::string nccl_refusal(const NcclApi& api, const OpDescription& description, double scale,
                         c10::Device device);

/// What is left to multiply a result with, where `scale` multiplies it and NCCL cannot; else 1.
double scale_left(ReduceOp op, double scale);

/// The op of one call, which ends with it where it had to be made.
class NcclReduction {
 public:
  /// `scale` multiplies the result, but for scale_left. REQUIRES: no nccl_refusal.
  NcclReduction(const NcclApi& api, ncclComm_t comm, const OpDescription& description, double scale,
                int world_size);
  ~NcclReduction();
  NcclReduction(const NcclReduction&) = delete;
  NcclReduction& operator=(const NcclReduction&) = delete;

  ncclDataType_t dtype() const { return dtype_; }
  ncclRedOp_t op() const { return op_; }

 private:
  void make_scaled_sum(double scale);

  const NcclApi& api_;
  const ncclComm_t comm_;
  ncclDataType_t dtype_;
  ncclRedOp_t op_ = ncclSum;
  bool is_made_ = false;
};

}  // namespace libddp
