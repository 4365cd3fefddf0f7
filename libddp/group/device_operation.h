#pragma once

// One operation of a group on a device: what its Work and the watchdog of devices share. It holds
// the memory that the operation uses until nobody can hand it out again too early.
//
// NOTE [Memory of device operations]
// torch's caching allocator gives memory that the host has freed to the next tensor of the stream
// that the memory was allocated on, at once: what that stream launches later comes behind all that
// it launched before. An operation on another stream must therefore keep its tensors until the
// stream of the allocation waits for its end, or the end has come. `order` with the stream of the
// call does the first, `finish` the second. Operations on the current stream itself keep nothing.
// Thread rule: any thread.
//
//   auto operation = std::make_shared<DeviceOperation>(description, 7, timeout, pool.take());
//   operation->hold({input, output}, std::move(on_success), current_stream);
//   operation->record_end(stream);
//   operation->order(current_stream);   // `current_stream` waits for it

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/op_description.h"
#include "libddp/group/event_pool.h"
#include "libddp/watchdog/flight_recorder.h"

namespace libddp {

class DeviceOperation {
 public:
  /// `sequence`: 0 for point to point.
  DeviceOperation(const OpDescription& description, std::uint64_t sequence,
                  std::chrono::milliseconds timeout, EventPool::Handle end);

  std::string text() const { return description.to_string(sequence); }

  /// Keeps memory that the operation uses on another stream than `caller`, the one it was called
  /// in: tensors, and a function with what it has captured.
  void hold(std::vector<at::Tensor> tensors, std::function<void()> function,
            const c10::Stream& caller);
  /// `stream` comes to it: from now on the device's own time counts. REQUIRES: events that can tell
  /// the time.
  void record_begin(EventPool::Handle begin, const c10::Stream& stream);
  /// All of it has been launched on `stream`.
  void record_end(const c10::Stream& stream);
  bool is_done() const { return end_->query(); }
  /// From its begin to its end on the device, zero where no begin was recorded. REQUIRES: is_done.
  std::chrono::nanoseconds device_time() const;
  /// `stream` waits for the end of the operation.
  void order(const c10::Stream& stream);
  /// The device has done it, or never will: nothing is held any more.
  void let_go();

  const OpDescription description;
  const std::uint64_t sequence;
  const std::chrono::milliseconds timeout;
  FlightRecorder::Ticket ticket = 0;

 private:
  struct Held {
    std::vector<at::Tensor> tensors;
    std::function<void()> function;
    c10::Stream caller;
  };

  EventPool::Handle begin_;
  const EventPool::Handle end_;
  std::optional<c10::Stream> stream_;
  std::mutex mutex_;
  std::optional<Held> held_;
  /// Whether it may hold something; the lock says. Most operations never do.
  std::atomic<bool> may_hold_{false};
};

}  // namespace libddp
