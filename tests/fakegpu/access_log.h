#pragma once

// The state behind race_checker.h: what operations did to which bytes, and what streams and the
// host know of each other. The device's parts report here at enqueue, in program order. Thread
// rule: any thread; one mutex.

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakegpu/clock.h"
#include "tests/fakegpu/device_stream.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"

namespace fakegpu {

struct ByteRange {
  std::uintptr_t begin;
  std::uintptr_t end;
};

class AccessLog {
 public:
  static AccessLog& get();

  void launch(const DeviceStream& stream, const std::string& name,
              const std::vector<ByteRange>& reads, const std::vector<ByteRange>& writes);

  /// The host reads and writes, now. What it did before a launch, that is behind.
  void host_uses(const std::string& name, const std::vector<ByteRange>& reads,
                 const std::vector<ByteRange>& writes);

  /// What an event knows that is recorded now.
  Clock record(const DeviceStream& stream);
  /// A stream waits for an event. False: the test wants this wait dropped.
  bool wait(const DeviceStream& stream, const Clock& event);
  /// `later` is behind all of `earlier`; no wait that a test can drop.
  void order(const DeviceStream& earlier, const DeviceStream& later);
  /// This thread has seen that it is over, without waiting for it; other threads do not know.
  void thread_saw(const Clock& clock);
  /// The host has blocked for it.
  void host_waited(c10::DeviceIndex device, const Clock& clock);
  void host_waited(const DeviceStream& stream);

  /// Memory that belongs to a stream, as the allocator gives it; without one, to the host.
  void allocated(const void* block, std::size_t bytes, const DeviceStream* owner);
  void freed(const void* block);
  /// Memory without an owner, by the host; `any` is a stream of its device. Forgotten.
  void freed_at_once(const void* block, const DeviceStream& any);
  void used_on(const void* block, const DeviceStream& stream);
  /// Back to the system.
  void forget(const void* block);

  std::vector<Race> take_races();
  void reset();
  void ignore_wait(std::int64_t k, int device);
  void ignore_host_wait(std::int64_t k, int device);
  std::int64_t num_waits(int device);
  std::vector<std::int64_t> redundant_waits(int device);
  std::int64_t num_operations(int device);
  std::int64_t num_host_waits(int device);

  // Around a fork.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Access {
    ByteRange range;
    bool writes;
    std::size_t slot;
    std::uint64_t tick;
    Operation operation;
  };
  struct Block {
    std::size_t bytes = 0;
    const DeviceStream* owner = nullptr;
    std::set<std::size_t> recorded;
    std::vector<Access> accesses;
    /// Freed while other streams' uses were not ordered before its owner's next operation.
    bool is_freed_in_use = false;
  };
  using Blocks = std::map<std::uintptr_t, Block>;

  Clock& stream_clock(const DeviceStream& stream);
  Clock& thread_clock();
  /// What an operation knows that `stream` begins now.
  const Clock& now(const DeviceStream& stream);
  void note(const Access& access, const Clock& clock);
  void note_in(Blocks::iterator block, const Access& access, const Clock& clock);
  void check_host(const std::string& name, const ByteRange& range, bool writes);
  void check_freed(const DeviceStream& owner);
  void add(const Blocks::const_iterator& block, const Access& first, const Operation& second,
           const ByteRange& range, bool is_freed);

  std::mutex mutex_;
  Blocks blocks_;
  std::map<std::size_t, Clock> streams_;
  std::array<Clock, kNumDevices> hosts_;
  /// What threads have seen to be over, without waiting for it.
  Clock seen_;
  /// Blocks with is_freed_in_use.
  std::set<std::uintptr_t> freed_in_use_;
  std::vector<Race> races_;
  /// Of all devices, never reset.
  std::uint64_t last_operation_ = 0;
  std::array<std::int64_t, kNumDevices> num_operations_{};
  std::array<std::int64_t, kNumDevices> num_host_waits_{};
  std::array<std::int64_t, kNumDevices> num_waits_{};
  std::array<std::vector<std::int64_t>, kNumDevices> redundant_;
  std::optional<std::int64_t> ignored_;
  int ignored_device_ = -1;
  /// Number and device.
  std::pair<std::int64_t, int> ignored_host_wait_{0, -1};
};

}  // namespace fakegpu
