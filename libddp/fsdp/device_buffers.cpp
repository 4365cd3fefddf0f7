#include "libddp/fsdp/device_buffers.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>

namespace libddp {

DeviceBuffer::~DeviceBuffer() {
  if (!bytes.defined()) return;
  try {
    users.order(home);
  } catch (const std::exception&) {
    // The device has failed: nobody gets memory of it.
  }
}

at::Tensor DeviceBuffer::as(std::int64_t numel, at::ScalarType dtype) const {
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, 0, numel * size).view(dtype);
}

std::shared_ptr<DeviceBuffers> DeviceBuffers::of(const Group& group, c10::Device device) {
  using Key = std::pair<const ProcessGroup*, c10::DeviceIndex>;
  static std::mutex mutex;
  static auto* const pools = new std::map<Key, std::weak_ptr<DeviceBuffers>>;
  const std::lock_guard lock(mutex);
  std::erase_if(*pools, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<DeviceBuffers>& known = (*pools)[{group.get(), device.index()}];
  std::shared_ptr<DeviceBuffers> pool = known.lock();
  if (!pool) known = pool = std::make_shared<DeviceBuffers>(group, device);
  return pool;
}

at::Tensor DeviceBuffers::allocate(std::int64_t bytes) const {
  if (group_) return group_->allocate({bytes}, at::kByte, device_);
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

HostCopies& DeviceBuffers::host_copies() {
  if (!host_copies_) host_copies_.emplace(device_);
  return *host_copies_;
}

// The smallest that is large enough: units of other sizes take turns too.
DeviceBuffer DeviceBuffers::take(std::int64_t numel, at::ScalarType dtype) {
  const std::int64_t bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->bytes.numel() < bytes) continue;
    if (best == free_.end() || it->bytes.numel() < best->bytes.numel()) best = it;
  }
  if (best == free_.end()) return DeviceBuffer(allocate(bytes), device_);
  DeviceBuffer buffer = std::move(*best);
  free_.erase(best);
  buffer.users.order_current();
  buffer.users.clear();
  return buffer;
}

}  // namespace libddp
