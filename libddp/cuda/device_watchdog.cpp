#include "libddp/cuda/device_watchdog.h"

#include <algorithm>
#include <utility>

#include "libddp/base/process.h"
#include "libddp/base/service_thread.h"
#include "libddp/cuda/stream_capture.h"

namespace libddp {

// Never destroyed: its thread may outlive static objects. A child of fork has no thread of its
// parent's, and must not touch its devices either.
DeviceWatchdog& DeviceWatchdog::get() {
  static std::mutex mutex;
  static DeviceWatchdog* of_process = nullptr;
  static ProcessStamp made;
  const std::lock_guard lock(mutex);
  if (of_process == nullptr || !made.is_current()) {
    of_process = new DeviceWatchdog;
    made = ProcessStamp();
  }
  return *of_process;
}

void DeviceWatchdog::add(std::shared_ptr<Watched> watched) {
  const std::lock_guard lock(mutex_);
  watched_.push_back(std::move(watched));
}

void DeviceWatchdog::remove(const Watched& watched) {
  std::unique_lock lock(mutex_);
  const auto is_it = [&](const std::shared_ptr<Watched>& entry) { return entry.get() == &watched; };
  std::erase_if(watched_, is_it);
  // A callback of an operation may end the group, in the watchdog's own thread.
  if (thread_.get_id() == std::this_thread::get_id()) return;
  changed_.wait(lock, [&] { return looked_at_ != &watched; });
}

void DeviceWatchdog::wake() {
  is_wanted_.store(true);
  if (!is_asleep_.load()) return;
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_service_thread("libddp-device", [this] { run(); });
  changed_.notify_all();
}

void DeviceWatchdog::run() {
  allow_queries_beside_capture();
  std::unique_lock lock(mutex_);
  while (true) {
    is_asleep_.store(true);
    changed_.wait(lock, [&] { return is_wanted_.load(); });
    is_asleep_.store(false);
    int idle_looks = 0;
    while (idle_looks < kLooksBeforeSleep) {
      const bool was_wanted = is_wanted_.exchange(false);
      idle_looks = look_at_all(lock) || was_wanted ? 0 : idle_looks + 1;
      changed_.wait_for(lock, kPeriod);
    }
  }
}

bool DeviceWatchdog::look_at_all(std::unique_lock<std::mutex>& lock) {
  bool is_any_in_flight = false;
  const std::vector<std::shared_ptr<Watched>> all = watched_;
  for (const std::shared_ptr<Watched>& watched : all) {
    if (std::find(watched_.begin(), watched_.end(), watched) == watched_.end()) continue;
    looked_at_ = watched.get();
    lock.unlock();
    is_any_in_flight |= watched->look();
    lock.lock();
    looked_at_ = nullptr;
    changed_.notify_all();
  }
  return is_any_in_flight;
}

}  // namespace libddp
