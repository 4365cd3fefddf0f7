#include <c10/core/Event.h>

#include <chrono>
#include <future>
#include <set>
#include <thread>

#include "tests/fakegpu/device_stream.h"
#include "tests/fakegpu/with_device.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace fakegpu::test {
namespace {

using libddp::test::expect;

c10::Event new_event(c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT) {
  return c10::Event(c10::DeviceType::PrivateUse1, flag);
}

TEST_CASE_METHOD(WithDevice, "a stream runs its tasks in order beside the host") {
  const c10::Stream stream = new_stream();
  std::vector<int> order;
  Hold hold(stream);
  for (int i = 0; i < 10; ++i)
    DeviceStream::of(stream).enqueue([&order, i] { order.push_back(i); });
  REQUIRE(order.empty());
  REQUIRE_FALSE(stream.query());
  hold.release();
  stream.synchronize();
  REQUIRE(order == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  REQUIRE(stream.query());
}

TEST_CASE_METHOD(WithDevice, "an event is over when what was before its record is") {
  const c10::Stream stream = new_stream();
  c10::Event event = new_event();
  REQUIRE(event.query());  // never recorded
  event.record(stream);
  event.synchronize();
  REQUIRE(event.query());
  Hold hold(stream);
  event.record(stream);
  REQUIRE_FALSE(event.query());
  hold.release();
  event.synchronize();
  REQUIRE(event.query());
}

TEST_CASE_METHOD(WithDevice, "a stream waits for an event, the host does not") {
  const c10::Stream first = new_stream();
  const c10::Stream second = new_stream();
  c10::Event event = new_event();
  Hold hold(first);
  event.record(first);
  event.block(second);
  REQUIRE_FALSE(second.query());
  hold.release();
  second.synchronize();
  REQUIRE(event.query());
}

TEST_CASE_METHOD(WithDevice, "a wait is for the record that it saw") {
  const c10::Stream first = new_stream();
  const c10::Stream second = new_stream();
  c10::Event event = new_event();
  event.record(first);
  event.block(second);
  Hold hold(first);
  event.record(first);
  second.synchronize();  // does not wait for the second record
  REQUIRE_FALSE(event.query());
}

TEST_CASE_METHOD(WithDevice, "events with timing tell the time between them") {
  const c10::Stream stream = new_stream();
  c10::Event begin = new_event(c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end = new_event(c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  DeviceStream::of(stream).enqueue(
      [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  end.record(stream);
  end.synchronize();
  REQUIRE(begin.elapsedTime(end) >= 4.0);
  c10::Event without = new_event();
  without.record(stream);
  REQUIRE_THROWS(begin.elapsedTime(without));
}

TEST_CASE_METHOD(WithDevice, "current device and streams are a thread's own") {
  const c10::Stream stream = new_stream(1);
  guard().setDevice(device_at(1));
  guard().exchangeStream(stream);
  std::async(std::launch::async, [&] {
    expect(guard().getDevice() == device_at(0), "the first device");
    expect(guard().getStream(device_at(1)) == default_stream(1), "its default stream");
  }).get();
  REQUIRE(guard().getDevice() == device_at(1));
  REQUIRE(guard().getStream(device_at(1)) == stream);
  guard().exchangeStream(default_stream(1));
  guard().setDevice(device_at(0));
}

TEST_CASE_METHOD(WithDevice, "streams differ, and so do their handles") {
  std::set<void*> handles{default_stream().native_handle(), default_stream(1).native_handle()};
  for (int i = 0; i < DeviceStream::kPoolSize; ++i) {
    handles.insert(guard().getStreamFromGlobalPool(device_at(0), false).native_handle());
    handles.insert(guard().getStreamFromGlobalPool(device_at(0), true).native_handle());
  }
  const c10::Stream stream = new_stream();
  handles.insert(stream.native_handle());
  REQUIRE(handles.size() == 2 + 2 * DeviceStream::kPoolSize + 1);
  REQUIRE(DeviceStream::of_handle(stream.native_handle()).stream() == stream);
  REQUIRE_THROWS(DeviceStream::of_handle(&handles));
  REQUIRE_THROWS(guard().getStream(device_at(kNumDevices)));
}

TEST_CASE_METHOD(WithDevice, "synchronising with a device waits for all its streams") {
  const c10::Stream first = new_stream();
  const c10::Stream second = new_stream();
  bool is_over = false;
  DeviceStream::of(first).enqueue(
      [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  DeviceStream::of(second).enqueue([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    is_over = true;
  });
  guard().synchronizeDevice(0);
  REQUIRE(is_over);
}

}  // namespace
}  // namespace fakegpu::test
