#pragma once

// A stream of the fake device: tasks that run one after the other, in a thread that the first task
// starts. A task may block (an event that has not come, a collective); the host does not.
//
// Streams are never destroyed, so their addresses serve as native handles. After a fork the child
// begins with new, idle ones.
// Thread rule: any thread.
//
//   DeviceStream& stream = DeviceStream::of(c10_stream);
//   stream.enqueue([] { ... });
//   stream.synchronize();

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace fakegpu {

class DeviceStream {
 public:
  /// Streams of the global pool per device and priority.
  static constexpr int kPoolSize = 32;

  static DeviceStream& of(c10::Stream stream);
  /// What Stream::native_handle() gave. Null, or what is none, throws.
  static DeviceStream& of_handle(void* handle);
  static c10::Stream from_pool(c10::DeviceIndex device, bool high_priority);
  static c10::Stream create(c10::DeviceIndex device);
  /// Those of a device that have been used.
  static std::vector<DeviceStream*> used(c10::DeviceIndex device);

  DeviceStream(c10::Stream stream, std::size_t slot) : stream_(stream), slot_(slot) {}

  c10::Stream stream() const { return stream_; }
  c10::DeviceIndex device() const { return stream_.device_index(); }
  /// Its component in clocks.
  std::size_t slot() const { return slot_; }

  void enqueue(std::function<void()> task);
  /// For a task that never blocks: it runs at once where nothing is before it.
  void enqueue_short(std::function<void()> task);
  bool is_idle();
  /// Blocks until what was enqueued before the call is over.
  void synchronize();

 private:
  void run();

  const c10::Stream stream_;
  const std::size_t slot_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::uint64_t num_enqueued_ = 0;
  std::uint64_t num_done_ = 0;
  bool has_thread_ = false;
};

}  // namespace fakegpu
