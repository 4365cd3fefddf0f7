#pragma once

// Arithmetic on arrays in NCCL's datatypes.

#include <cstddef>
#include <vector>

#include "libddp/cuda/nccl_header.h"

namespace mock_nccl {

/// 0 for what is no datatype.
std::size_t size_of(ncclDataType_t dtype);

/// `out` = the ranks' arrays reduced in rank order; half precisions are added in float.
void reduce(const std::vector<const void*>& inputs, void* out, std::size_t count,
            ncclDataType_t dtype, ncclRedOp_t op);

/// `data` *= the one element at `scalar`.
void scale(void* data, std::size_t count, ncclDataType_t dtype, const void* scalar);

}  // namespace mock_nccl
