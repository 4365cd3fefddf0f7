// c10's view of the fake device: current device and streams per thread, events. Registered when the
// library is loaded.

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/device_allocator.h"
#include "tests/fakegpu/device_stream.h"
#include "tests/fakegpu/fake_device.h"

namespace fakegpu {
namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> current_streams{};

std::atomic<bool> is_capturing{false};

/// One record of an event.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::chrono::steady_clock::time_point time;
  Clock clock;

  void finish() {
    const std::lock_guard lock(mutex);
    is_done = true;
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return is_done; });
  }
  bool query() {
    const std::lock_guard lock(mutex);
    return is_done;
  }
};

class Event {
 public:
  Event(c10::DeviceIndex device, bool has_time) : device(device), has_time(has_time) {}

  /// The newest record, null before the first; waits keep the one that they saw.
  std::shared_ptr<Mark> mark() const {
    const std::lock_guard lock(mutex_);
    return mark_;
  }
  void set_mark(std::shared_ptr<Mark> mark) {
    const std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }

  const c10::DeviceIndex device;
  const bool has_time;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Mark> mark_;
};

/// Null for an event that was never recorded.
std::shared_ptr<Mark> mark_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->mark();
}

c10::DeviceIndex checked(c10::DeviceIndex device) {
  TORCH_CHECK(device < kNumDevices, "fakegpu: invalid device ordinal ", int{device}, ", there are ",
              kNumDevices);
  return device < 0 ? current_device : device;
}

Event& event_of(void* event) {
  TORCH_CHECK(event != nullptr, "fakegpu: the event was never recorded");
  return *static_cast<Event*>(event);
}

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device getDevice() const override { return device_at(current_device); }
  void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(checked(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(checked(device.index())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return DeviceStream::from_pool(checked(device.index()), is_high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return DeviceStream::create(checked(device.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &DeviceStream::of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    DeviceStream& queried = DeviceStream::of(stream);
    const Clock clock = AccessLog::get().record(queried);
    if (!queried.is_idle()) return false;
    AccessLog::get().host_saw(queried.device(), clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    DeviceStream& awaited = DeviceStream::of(stream);
    const Clock clock = AccessLog::get().record(awaited);
    awaited.synchronize();
    AccessLog::get().host_waited(awaited.device(), clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (DeviceStream* const stream : DeviceStream::used(checked(device)))
      synchronizeStream(stream->stream());
  }
  /// Not an override: torch 2.11 has none.
  virtual bool isStreamCapturing(const c10::Stream&) const { return is_capturing.load(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "fakegpu: an event of device ",
                int{device}, " is recorded on a stream of device ", int{stream.device_index()});
    if (*event == nullptr)
      *event = new Event(stream.device_index(), flag == c10::EventFlag::BACKEND_DEFAULT);
    DeviceStream& recorded = DeviceStream::of(stream);
    auto mark = std::make_shared<Mark>();
    mark->clock = AccessLog::get().record(recorded);
    event_of(*event).set_mark(mark);
    recorded.enqueue_short([mark] { mark->finish(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::shared_ptr<Mark> mark = mark_of(event);
    if (mark == nullptr) return;
    DeviceStream& waiting = DeviceStream::of(stream);
    if (AccessLog::get().wait(waiting, mark->clock) && !mark->query())
      waiting.enqueue([mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override {
    const std::shared_ptr<Mark> mark = mark_of(event);
    if (mark == nullptr) return true;
    if (!mark->query()) return false;
    AccessLog::get().host_saw(event_of(event).device, mark->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    const std::shared_ptr<Mark> mark = mark_of(event);
    if (mark == nullptr) return;
    mark->wait();
    AccessLog::get().host_waited(event_of(event).device, mark->clock);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(event_of(first).has_time && event_of(second).has_time,
                "fakegpu: both events must be created with argument 'enable_timing=True'");
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "fakegpu: both events must be completed");
    const std::chrono::duration<double, std::milli> time =
        mark_of(second)->time - mark_of(first)->time;
    return time.count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    DeviceAllocator::get().recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

}  // namespace

c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device),
                     current_streams.at(static_cast<std::size_t>(device)));
}

void set_capturing(bool capturing) { is_capturing.store(capturing); }

struct Hold::Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
};

Hold::Hold(c10::Stream stream) : gate_(std::make_shared<Gate>()) {
  DeviceStream::of(stream).enqueue([gate = gate_] {
    std::unique_lock lock(gate->mutex);
    gate->changed.wait(lock, [&] { return gate->is_open; });
  });
}

Hold::~Hold() { release(); }

void Hold::release() {
  const std::lock_guard lock(gate_->mutex);
  gate_->is_open = true;
  gate_->changed.notify_all();
}

}  // namespace fakegpu
