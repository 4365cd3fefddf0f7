#pragma once

// What writes into a tensor in place is counted by autograd, but for writes through `.data`.
// Thread rule: one thread at a time per tensor.
//
//   const std::int64_t before = version_of(tensor);

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace libddp {

/// How often it was changed in place; 0 for inference tensors, which cannot tell.
inline std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

}  // namespace libddp
