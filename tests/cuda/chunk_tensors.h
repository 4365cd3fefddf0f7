#pragma once

// Tensors of bytes, as large as chunks of snapshots.

#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "libddp/slots/chunk_source.h"

namespace libddp::test {

constexpr std::int64_t kChunk = kChunkBytes;

inline at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

/// On the CPU, none of them 0.
inline at::Tensor random_bytes(std::int64_t count) {
  return at::randint(1, 256, {count}, bytes_on(at::kCPU));
}

}  // namespace libddp::test
