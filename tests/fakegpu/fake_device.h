#pragma once

// A device without hardware, torch's PrivateUse1 backend under the name "fakegpu": streams, events,
// allocator, generators and operators as CUDA has them, over host memory. What libddp does on CUDA
// through c10's guards and ATen runs here without a GPU.
//
// How it computes: each stream runs its tasks in order beside the host. Events and mock NCCL's
// operations are such tasks. An ATen operator waits for what its stream has and then runs in the
// caller's thread, over the same memory (a slow host, nothing else); race_checker.h tells what
// would not have been ordered on a device that does not wait.
//
// Loading the library registers everything. Thread rule: any thread.
//
//   const c10::Stream side = c10::impl::VirtualGuardImpl(fakegpu::device_at(0).type())
//                                .getStreamFromGlobalPool(fakegpu::device_at(0));
//   fakegpu::Hold hold(side);          // nothing behind it runs ...
//   { c10::StreamGuard guard(side); event.record(side); }
//   REQUIRE_FALSE(event.query());
//   hold.release();                    // ... until here

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

namespace fakegpu {

constexpr int kNumDevices = 4;

inline c10::Device device_at(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

/// This thread's, on a device.
c10::Stream current_stream(int device);

/// Holds a stream up: what is enqueued behind it waits until release, or its end. An operator on
/// that stream blocks the host meanwhile.
class Hold {
 public:
  explicit Hold(c10::Stream stream);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void release();

 private:
  struct Gate;
  std::shared_ptr<Gate> gate_;
};

/// What isStreamCapturing answers for all streams.
void set_capturing(bool capturing);

struct MemoryUse {
  std::int64_t allocated_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t num_allocations = 0;
};
/// Of tensors; num_allocations counts all that there have been.
MemoryUse memory_use(int device);
void reset_peak_memory(int device);
/// An allocation beyond it throws c10::OutOfMemoryError; negative: no limit.
void set_memory_limit(int device, std::int64_t bytes);

}  // namespace fakegpu
