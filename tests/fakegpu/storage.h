#pragma once

// What operators need of tensors' memory: views of it as CPU tensors, its bytes, resizing.
//
//   CpuAliases aliases;
//   at::Tensor same_memory = aliases.of(device_tensor);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <vector>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/device_stream.h"

namespace fakegpu {

/// CPU tensors over device tensors' memory; tensors of one storage get ones of one storage.
class CpuAliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  /// The device storage that this CPU storage stands for; null: none.
  c10::StorageImpl* behind(c10::StorageImpl* alias) const;

 private:
  /// Keyed by the device's storage.
  std::map<c10::StorageImpl*, c10::Storage> storages_;
};

/// A new tensor over `storage` with the dtype, sizes, strides and offset of `shape`.
at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& shape, c10::DispatchKey key);
/// Allocates on the tensor's stream what `alias` has beyond the tensor's storage, and takes over
/// its shape and, where it has got other memory, its contents.
void take_shape(const at::Tensor& tensor, const at::Tensor& alias);
/// Keeps what fits.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);
/// The bytes of a tensor's elements, in as few ranges as its strides allow.
void add_ranges(const at::Tensor& tensor, std::vector<ByteRange>& ranges);

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}
/// The calling thread's current stream on a device.
inline DeviceStream& stream_on(c10::DeviceIndex device) {
  return DeviceStream::of(current_stream(device));
}

}  // namespace fakegpu
