#include "tests/fakegpu/device_stream.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "tests/fakegpu/fake_device.h"

namespace fakegpu {
namespace {

/// All streams of a process.
struct Streams {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<DeviceStream>> streams;
  std::set<void*> handles;
  std::array<std::array<int, 2>, kNumDevices> next_of_pool{};
  /// Behind those of the pools; id 0 is the default stream.
  c10::StreamId next_id = 1 + 2 * DeviceStream::kPoolSize;
};

/// Never freed: the streams' threads outlive static objects. A forked child leaves its parent's
/// behind, whose threads it does not have.
Streams*& table() {
  static Streams* streams = [] {
    ::pthread_atfork([] { table()->mutex.lock(); }, [] { table()->mutex.unlock(); },
                     [] {
                       auto* const fresh = new Streams;
                       fresh->next_id = table()->next_id;
                       table() = fresh;
                     });
    return new Streams;
  }();
  return streams;
}

/// Slots are never used twice in a process, so that a child's clocks go on.
std::size_t next_slot() {
  static std::atomic<std::size_t> slot{0};
  return slot++;
}

}  // namespace

DeviceStream& DeviceStream::of(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == c10::DeviceType::PrivateUse1 && stream.device_index() >= 0 &&
                  stream.device_index() < kNumDevices,
              "fakegpu: ", stream, " is not a stream of this device");
  Streams& all = *table();
  const std::lock_guard lock(all.mutex);
  std::unique_ptr<DeviceStream>& found = all.streams[{stream.device_index(), stream.id()}];
  if (found == nullptr) {
    found = std::make_unique<DeviceStream>(stream, next_slot());
    all.handles.insert(found.get());
  }
  return *found;
}

DeviceStream& DeviceStream::of_handle(void* handle) {
  Streams& all = *table();
  const std::lock_guard lock(all.mutex);
  TORCH_CHECK(all.handles.count(handle) == 1, "fakegpu: ", handle, " is no stream's handle");
  return *static_cast<DeviceStream*>(handle);
}

c10::Stream DeviceStream::from_pool(c10::DeviceIndex device, bool high_priority) {
  Streams& all = *table();
  const std::lock_guard lock(all.mutex);
  int& next = all.next_of_pool.at(device).at(high_priority ? 1 : 0);
  const int id = 1 + next + (high_priority ? kPoolSize : 0);
  next = (next + 1) % kPoolSize;
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

c10::Stream DeviceStream::create(c10::DeviceIndex device) {
  Streams& all = *table();
  const std::lock_guard lock(all.mutex);
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), all.next_id++);
}

std::vector<DeviceStream*> DeviceStream::used(c10::DeviceIndex device) {
  Streams& all = *table();
  const std::lock_guard lock(all.mutex);
  std::vector<DeviceStream*> found;
  for (const auto& [key, stream] : all.streams) {
    if (key.first == device) found.push_back(stream.get());
  }
  return found;
}

void DeviceStream::enqueue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  ++num_enqueued_;
  if (!has_thread_) {
    std::thread([this] { run(); }).detach();
    has_thread_ = true;
  }
  changed_.notify_all();
}

void DeviceStream::enqueue_short(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (num_done_ == num_enqueued_) {
      task();
      return;
    }
  }
  enqueue(std::move(task));
}

bool DeviceStream::is_idle() {
  const std::lock_guard lock(mutex_);
  return num_done_ == num_enqueued_;
}

void DeviceStream::synchronize() {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = num_enqueued_;
  changed_.wait(lock, [&] { return num_done_ >= target; });
}

void DeviceStream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !tasks_.empty(); });
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes before anyone hears that it is over
    lock.lock();
    ++num_done_;
    changed_.notify_all();
  }
}

}  // namespace fakegpu
