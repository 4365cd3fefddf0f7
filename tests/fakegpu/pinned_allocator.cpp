#include "tests/fakegpu/pinned_allocator.h"

#include <cstdlib>
#include <new>

#include "tests/fakegpu/access_log.h"

namespace fakegpu {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

PinnedAllocator& PinnedAllocator::get() {
  static auto* const allocator = new PinnedAllocator;  // never freed: tensors in static objects
  return *allocator;
}

c10::DataPtr PinnedAllocator::allocate(std::size_t bytes) {
  // Never of no bytes: an empty tensor is pinned too.
  const std::size_t size = (bytes + kPage) / kPage * kPage;
  void* const data = std::aligned_alloc(kPage, size);
  if (data == nullptr) throw std::bad_alloc();
  const std::lock_guard lock(mutex_);
  blocks_[reinterpret_cast<std::uintptr_t>(data)] = size;
  AccessLog::get().allocated(data, size, nullptr);
  return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
}

void PinnedAllocator::free_block(void* data) {
  PinnedAllocator& allocator = get();
  const std::lock_guard lock(allocator.mutex_);
  allocator.blocks_.erase(reinterpret_cast<std::uintptr_t>(data));
  AccessLog::get().forget(data);
  std::free(data);
}

void PinnedAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

bool PinnedAllocator::owns(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(mutex_);
  auto found = blocks_.upper_bound(address);
  if (found == blocks_.begin()) return false;
  --found;
  return address < found->first + found->second;
}

}  // namespace fakegpu
