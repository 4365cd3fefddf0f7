#include "libddp/fsdp/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace libddp {

std::shared_ptr<BufferPool> BufferPool::of(const Group& group, const Group& ranks) {
  const ProcessGroup* const owner = group ? group.get() : ranks.get();
  // Nothing tells models of one thread from those of another.
  if (owner == nullptr) return std::make_shared<BufferPool>(group);
  using Key = std::pair<const ProcessGroup*, const ProcessGroup*>;
  static std::mutex mutex;
  static auto* const pools = new std::map<Key, std::weak_ptr<BufferPool>>;
  const std::lock_guard lock(mutex);
  std::erase_if(*pools, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<BufferPool>& known = (*pools)[{group.get(), owner}];
  std::shared_ptr<BufferPool> pool = known.lock();
  if (!pool) known = pool = std::make_shared<BufferPool>(group);
  return pool;
}

at::Tensor BufferPool::take(std::int64_t numel, at::ScalarType dtype) {
  const auto fits = std::find_if(free_.begin(), free_.end(), [&](const at::Tensor& buffer) {
    return buffer.numel() == numel && buffer.scalar_type() == dtype;
  });
  if (fits == free_.end()) {
    return group_ ? group_->allocate({numel}, dtype) : at::empty({numel}, dtype);
  }
  at::Tensor buffer = std::move(*fits);
  free_.erase(fits);
  return buffer;
}

void BufferPool::give(at::Tensor buffer) { free_.push_back(std::move(buffer)); }

}  // namespace libddp
