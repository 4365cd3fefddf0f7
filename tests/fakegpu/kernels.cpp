// Operators of the fake device that are more than the CPU's kernel over the same memory: they
// allocate, change a tensor's storage, move bytes between devices, or draw random numbers.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <tuple>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/device_allocator.h"
#include "tests/fakegpu/storage.h"

namespace fakegpu {
namespace {

c10::Device or_current(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice();
}

void refuse_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(sizes, &DeviceAllocator::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pin_memory) {
  refuse_pinned(pin_memory);
  const c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, &DeviceAllocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// Of a copy's side; null for a tensor of the host.
DeviceStream* stream_of(const at::Tensor& tensor) {
  return is_on_device(tensor) ? &stream_on(tensor.device().index()) : nullptr;
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  DeviceStream* const from_stream = stream_of(from);
  DeviceStream* const to_stream = stream_of(to);
  // Between devices, as on CUDA: in the source's stream, behind and before the other's.
  DeviceStream& stream = from_stream != nullptr ? *from_stream : *to_stream;
  const bool is_between_devices =
      from_stream != nullptr && to_stream != nullptr && from_stream != to_stream;
  AccessLog& log = AccessLog::get();
  if (is_between_devices) {
    to_stream->synchronize();
    log.order(*to_stream, stream);
  }
  stream.synchronize();
  CpuAliases aliases;
  const at::Tensor target = to_stream == nullptr ? to : aliases.of(to);
  const at::Tensor source = from_stream == nullptr ? from : aliases.of(from);
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::DisableRecordFunctionGuard not_of_the_host;
    target.copy_(source);
  }
  std::vector<ByteRange> reads;
  std::vector<ByteRange> writes;
  add_ranges(from, reads);
  add_ranges(to, writes);
  log.launch(stream, "aten::copy_", reads, writes);
  if (is_between_devices) log.order(stream, *to_stream);
  const bool is_with_host = from_stream == nullptr || to_stream == nullptr;
  if (is_with_host && !non_blocking) log.host_waited(stream);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  const at::Tensor on_host = at::empty({}, tensor.options().device(at::kCPU));
  on_host.copy_(tensor.reshape({}));
  return at::_local_scalar_dense(on_host);
}

void grow_storage(const at::Tensor& tensor) {
  const std::size_t bytes =
      tensor.numel() == 0
          ? 0
          : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                             tensor.element_size(), tensor.storage_offset());
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) resize_storage(storage, bytes);
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, std::int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  TORCH_CHECK(storage.device() == tensor.device(), "fakegpu: set_ with a storage of ",
              storage.device(), " for a tensor of ", tensor.device());
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<std::int64_t>(storage.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Tensor& set_nothing(at::Tensor& tensor) {
  return set_tensor(tensor, at::empty({0}, tensor.options()));
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  DeviceAllocator::get().recordStream(tensor.storage().data_ptr(), stream);
}

/// CPU's kernel would draw from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const double kept = 1 - p;
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0.0 : 1 / kept), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
}

}  // namespace
}  // namespace fakegpu
