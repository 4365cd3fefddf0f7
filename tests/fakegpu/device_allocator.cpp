#include "tests/fakegpu/device_allocator.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tests/fakegpu/access_log.h"

namespace fakegpu {
namespace {

constexpr std::size_t kAlignment = 512;
/// From here on sizes are rounded to it, so that few lists hold many sizes.
constexpr std::size_t kLarge = std::size_t{1} << 20;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 34;

std::size_t rounded(std::size_t bytes) {
  const std::size_t unit = bytes < kLarge ? kAlignment : kLarge;
  return (bytes + unit - 1) / unit * unit;
}

std::uintptr_t base_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

DeviceAllocator& DeviceAllocator::get() {
  static DeviceAllocator& allocator = []() -> DeviceAllocator& {
    auto* const made = new DeviceAllocator;  // never freed: tensors in static objects
    // A fork takes locks in the reverse order of registration: this one's first, as allocating
    // does.
    AccessLog::get();
    DeviceStream::used(0);
    ::pthread_atfork([] { get().lock(); }, [] { get().unlock(); }, [] { get().unlock(); });
    return *made;
  }();
  return allocator;
}

c10::DataPtr DeviceAllocator::allocate(std::size_t bytes) {
  const c10::Device device =
      device_at(c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice().index());
  return allocate_on(bytes, DeviceStream::of(current_stream(device.index())));
}

c10::DataPtr DeviceAllocator::allocate_on(std::size_t bytes, DeviceStream& stream) {
  const c10::Device device = stream.stream().device();
  if (bytes == 0) return {nullptr, nullptr, &free_block, device};
  const std::size_t size = rounded(bytes);
  const std::lock_guard lock(mutex_);
  check_limit(size, device.index());
  void* data = take_free(size, stream);
  if (data == nullptr) {
    data = std::aligned_alloc(kAlignment, size);
    if (data == nullptr) throw std::bad_alloc();
  }
  blocks_[base_of(data)] = {size, &stream, true, false, {}};
  MemoryUse& use = uses_.at(device.index());
  use.allocated_bytes += static_cast<std::int64_t>(size);
  use.peak_bytes = std::max(use.peak_bytes, use.allocated_bytes);
  ++use.num_allocations;
  AccessLog::get().allocated(data, size, &stream);
  return {data, data, &free_block, device};
}

void DeviceAllocator::check_limit(std::size_t bytes, c10::DeviceIndex device) {
  const std::int64_t limit = limits_.at(device);
  const std::int64_t used = uses_.at(device).allocated_bytes;
  if (limit < 0 || used + static_cast<std::int64_t>(bytes) <= limit) return;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "fakegpu out of memory. Tried to allocate ", bytes,
                   " bytes. Device ", int{device}, " has ", limit, " bytes, of which ", used,
                   " are in use.");
}

void* DeviceAllocator::take_free(std::size_t bytes, DeviceStream& stream) {
  for (auto& [base, block] : blocks_) {
    if (block.is_used || block.bytes != bytes || block.stream != &stream) continue;
    const auto is_idle = [](DeviceStream* other) { return other->is_idle(); };
    if (std::all_of(block.streams.begin(), block.streams.end(), is_idle))
      return reinterpret_cast<void*>(base);
  }
  return nullptr;
}

void DeviceAllocator::free_block(void* data) {
  if (data != nullptr) get().free(data);
}

void DeviceAllocator::free(void* data) {
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.at(base_of(data));
  block.is_used = false;
  uses_.at(block.stream->device()).allocated_bytes -= static_cast<std::int64_t>(block.bytes);
  AccessLog::get().freed(data);
}

void* DeviceAllocator::allocate_plain(std::size_t bytes) {
  const auto* const guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  DeviceStream& stream = DeviceStream::of(guard->getDefaultStream(guard->getDevice()));
  const std::size_t size = rounded(std::max<std::size_t>(bytes, 1));
  void* const data = std::aligned_alloc(kAlignment, size);
  if (data == nullptr) throw std::bad_alloc();
  const std::lock_guard lock(mutex_);
  blocks_[base_of(data)] = {size, &stream, true, true, {}};
  AccessLog::get().allocated(data, size, nullptr);
  return data;
}

bool DeviceAllocator::free_plain(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(base_of(data));
  if (found == blocks_.end() || !found->second.is_plain) return false;
  const DeviceStream& stream = *found->second.stream;
  AccessLog::get().freed_at_once(data, stream);
  const std::vector<DeviceStream*> streams = DeviceStream::used(stream.device());
  blocks_.erase(found);
  // Tasks of streams may still use it, wrongly: they must not write over something else.
  const auto is_idle = [](DeviceStream* stream) { return stream->is_idle(); };
  if (std::all_of(streams.begin(), streams.end(), is_idle)) std::free(data);
  return true;
}

void DeviceAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

void DeviceAllocator::emptyCache(c10::MempoolId_t) {
  for (int device = 0; device < kNumDevices; ++device) {
    for (DeviceStream* const stream : DeviceStream::used(static_cast<c10::DeviceIndex>(device))) {
      stream->synchronize();
      AccessLog::get().host_waited(*stream);
    }
  }
  const std::lock_guard lock(mutex_);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    if (it->second.is_used) {
      ++it;
      continue;
    }
    AccessLog::get().forget(reinterpret_cast<void*>(it->first));
    std::free(reinterpret_cast<void*>(it->first));
    it = blocks_.erase(it);
  }
}

void DeviceAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(base_of(data.get()));
  if (found == blocks_.end()) return;
  DeviceStream& other = DeviceStream::of(stream);
  found->second.streams.push_back(&other);
  AccessLog::get().used_on(data.get(), other);
}

c10::CachingDeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex device) {
  const MemoryUse use = this->use(device);
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0].current = use.allocated_bytes;
  stats.allocated_bytes[0].peak = use.peak_bytes;
  return stats;
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  uses_.at(device).peak_bytes = uses_.at(device).allocated_bytes;
}

std::pair<std::size_t, std::size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex device) {
  return {kDeviceBytes - static_cast<std::size_t>(use(device).allocated_bytes), kDeviceBytes};
}

MemoryUse DeviceAllocator::use(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  return uses_.at(device);
}

void DeviceAllocator::set_limit(c10::DeviceIndex device, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  limits_.at(device) = bytes;
}

c10::DeviceIndex DeviceAllocator::device_of(const void* data) {
  const std::lock_guard lock(mutex_);
  auto found = blocks_.upper_bound(base_of(data));
  if (found == blocks_.begin()) return -1;
  --found;
  const bool is_inside = base_of(data) < found->first + found->second.bytes;
  return is_inside ? found->second.stream->device() : c10::DeviceIndex{-1};
}

MemoryUse memory_use(int device) {
  return DeviceAllocator::get().use(static_cast<c10::DeviceIndex>(device));
}
void reset_peak_memory(int device) {
  DeviceAllocator::get().resetPeakStats(static_cast<c10::DeviceIndex>(device));
}
void set_memory_limit(int device, std::int64_t bytes) {
  DeviceAllocator::get().set_limit(static_cast<c10::DeviceIndex>(device), bytes);
}

namespace {
/// Before torch's own registrations of this priority, of which there are none for this type.
[[maybe_unused]] const bool is_allocator_registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &DeviceAllocator::get(), 1);
  return true;
}();
}  // namespace

}  // namespace fakegpu
