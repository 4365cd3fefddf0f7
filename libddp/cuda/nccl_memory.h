#pragma once

// Memory that NCCL itself has allocated and registered with a communicator, so that its transports
// reach it without a copy of their own. For tensors that are communicated again and again: buckets,
// flat arrays. It is not torch's caching allocator's.
//
// A tensor of it that is freed waits for its device first: what has been launched may still use it.
// Thread rule: any thread; tensors may outlive the communicator.
//
//   at::Tensor bucket = nccl_memory(api, communicator, {1 << 20}, at::kFloat, device);

#include <ATen/core/Tensor.h>

#include <memory>

#include "libddp/cuda/nccl_api.h"
#include "libddp/cuda/nccl_communicator.h"

namespace libddp {

/// LIBDDP_NCCL_REGISTER=1 asks for it.
bool wants_nccl_memory();

/// Uninitialised. Throws DeviceError with NCCL's text where it cannot allocate.
at::Tensor nccl_memory(const NcclApi& api, std::shared_ptr<NcclCommunicator> communicator,
                       at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace libddp
