#include "tests/fakegpu/storage.h"

#include <algorithm>
#include <cstring>

#include "tests/fakegpu/device_allocator.h"

namespace fakegpu {
namespace {

/// Beyond this many ranges the span of all is noted: scattered elements.
constexpr std::size_t kMaxRanges = 4096;

c10::Storage same_memory_on_cpu(const c10::Storage& storage) {
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                               storage.nbytes(), std::move(data),
                                               c10::GetAllocator(c10::DeviceType::CPU), true);
}

}  // namespace

at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& shape, c10::DispatchKey key) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), shape.dtype());
  c10::TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  if (shape.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  made._set_conj(shape.is_conj());
  made._set_neg(shape.is_neg());
  return made;
}

at::Tensor CpuAliases::of(const at::Tensor& tensor) {
  c10::StorageImpl* const key = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(key);
  if (found == storages_.end())
    found = storages_.emplace(key, same_memory_on_cpu(tensor.storage())).first;
  return tensor_over(found->second, tensor, c10::DispatchKey::CPU);
}

c10::StorageImpl* CpuAliases::behind(c10::StorageImpl* alias) const {
  for (const auto& [device, cpu] : storages_) {
    if (cpu.unsafeGetStorageImpl() == alias) return device;
  }
  return nullptr;
}

void take_shape(const at::Tensor& tensor, const at::Tensor& alias) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (alias.storage().nbytes() > storage.nbytes())
    resize_storage(storage, alias.storage().nbytes());
  if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides() ||
      alias.storage_offset() != tensor.storage_offset()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                        alias.storage_offset());
  }
  const void* const data = alias.storage().data();
  if (data != storage.data() && data != nullptr)
    std::memcpy(storage.mutable_data(), data, alias.storage().nbytes());
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  DeviceStream& stream = stream_on(storage.device().index());
  c10::DataPtr data = DeviceAllocator::get().allocate_on(bytes, stream);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    stream.synchronize();
    std::memcpy(data.get(), storage.data(), kept);
    const auto from = reinterpret_cast<std::uintptr_t>(storage.data());
    const auto to = reinterpret_cast<std::uintptr_t>(data.get());
    AccessLog::get().launch(stream, "resize of a storage", {{from, from + kept}},
                            {{to, to + kept}});
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

void add_ranges(const at::Tensor& tensor, std::vector<ByteRange>& ranges) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0)
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t run = 1;  // elements in a row
  std::size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first <= run; ++inner)
    run = (dims[inner].second - 1) * dims[inner].first + run;
  std::int64_t span = run;
  std::size_t num_runs = 1;
  for (std::size_t dim = inner; dim < dims.size(); ++dim) {
    span += (dims[dim].second - 1) * dims[dim].first;
    num_runs *= static_cast<std::size_t>(dims[dim].second);
  }
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  const auto base = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto add = [&](std::int64_t offset, std::int64_t length) {
    const std::uintptr_t begin = base + static_cast<std::uintptr_t>(offset * size);
    ranges.push_back({begin, begin + static_cast<std::uintptr_t>(length * size)});
  };
  if (num_runs > kMaxRanges) return add(0, span);
  for (std::size_t index = 0; index < num_runs; ++index) {
    std::int64_t offset = 0;
    std::size_t rest = index;
    for (std::size_t dim = inner; dim < dims.size(); ++dim) {
      const auto count = static_cast<std::size_t>(dims[dim].second);
      offset += static_cast<std::int64_t>(rest % count) * dims[dim].first;
      rest /= count;
    }
    add(offset, run);
  }
}

}  // namespace fakegpu
