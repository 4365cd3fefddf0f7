#pragma once

// Watches what groups have in flight on devices: which operations are done, which do not end in
// time, what NCCL reports, and whether a rank has been lost meanwhile, which the watchdog of the
// peers (watchdog/watchdog.h) finds out. One thread for all groups of the process.
//
// The thread starts with the first operation. It sleeps while nothing is in flight, but not at
// once: waking it costs who issues an operation more than the rest of that, and a step issues many.
// Thread rule: any thread. `look` runs in the watchdog's thread; once `remove` has returned it does
// not run any more.
//
//   DeviceWatchdog::get().add(flights);      // looks at it until it is removed
//   DeviceWatchdog::get().wake();            // something is in flight
//   DeviceWatchdog::get().remove(*flights);

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace libddp {

class DeviceWatchdog {
 public:
  /// How often what is in flight is looked at.
  static constexpr std::chrono::milliseconds kPeriod{10};
  /// So often in a row it has found nothing in flight, and nothing been issued, before it sleeps: a
  /// second.
  static constexpr int kLooksBeforeSleep = 100;

  class Watched {
   public:
    virtual ~Watched() = default;
    /// Returns whether anything is in flight.
    virtual bool look() noexcept = 0;
  };

  /// Of this process; a forked child has one of its own.
  static DeviceWatchdog& get();

  void add(std::shared_ptr<Watched> watched);
  void remove(const Watched& watched);
  void wake();

 private:
  DeviceWatchdog() = default;
  void run();
  /// Returns whether anything is in flight.
  bool look_at_all(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Watched>> watched_;
  /// What `look` runs for now.
  const Watched* looked_at_ = nullptr;
  /// Something may be in flight; the thread waits for that.
  std::atomic<bool> is_wanted_{false};
  std::atomic<bool> is_asleep_{true};
  std::thread thread_;
};

}  // namespace libddp
