#pragma once

// Memory of the fake device: host memory in blocks of a rounded size, which go back to a list of
// the stream that they were allocated on and from there to its next allocation, at once, whatever
// other streams still do with them: as torch's caching allocator works. Thread rule: any thread.

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "tests/fakegpu/device_stream.h"
#include "tests/fakegpu/fake_device.h"

namespace fakegpu {

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator& get();

  /// On the calling thread's current device and stream.
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DataPtr allocate_on(std::size_t bytes, DeviceStream& stream);
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  bool initialized() override { return true; }
  /// Waits for the devices, as CUDA does.
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;

  /// As cudaMalloc and cudaFree: of the current device, of no stream. Freeing what the host does
  /// not know to be unused is a race. False: not such memory.
  void* allocate_plain(std::size_t bytes);
  bool free_plain(void* data);

  MemoryUse use(c10::DeviceIndex device);
  void set_limit(c10::DeviceIndex device, std::int64_t bytes);
  /// The device of memory that this gave out; -1: not its own.
  c10::DeviceIndex device_of(const void* data);

  // Around a fork.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Block {
    std::size_t bytes;
    DeviceStream* stream;
    bool is_used;
    bool is_plain;
    /// Others that use it (recordStream).
    std::vector<DeviceStream*> streams;
  };

  static void free_block(void* data);
  void free(void* data);
  void* take_free(std::size_t bytes, DeviceStream& stream);
  void check_limit(std::size_t bytes, c10::DeviceIndex device);

  std::mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  std::array<MemoryUse, kNumDevices> uses_;
  std::array<std::int64_t, kNumDevices> limits_{-1, -1, -1, -1};
};

}  // namespace fakegpu
