#pragma once

// Pinned host memory: memory of the host that this allocator knows again. The race checker sees
// what the device does with it, and the host's operators. Thread rule: any thread.

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace fakegpu {

class PinnedAllocator final : public c10::Allocator {
 public:
  static PinnedAllocator& get();

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  bool owns(const void* data);

 private:
  static void free_block(void* data);

  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> blocks_;
};

}  // namespace fakegpu
