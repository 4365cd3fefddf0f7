#include "libddp/group/device_operation.h"

#include <utility>

namespace libddp {

DeviceOperation::DeviceOperation(const OpDescription& description, std::uint64_t sequence,
                                 std::chrono::milliseconds timeout, EventPool::Handle end)
    : description(description), sequence(sequence), timeout(timeout), end_(std::move(end)) {}

void DeviceOperation::hold(std::vector<at::Tensor> tensors, std::function<void()> function,
                           const c10::Stream& caller) {
  const std::lock_guard lock(mutex_);
  held_.emplace(Held{std::move(tensors), std::move(function), caller});
  may_hold_.store(true);
}

void DeviceOperation::record_begin(EventPool::Handle begin, const c10::Stream& stream) {
  begin_ = std::move(begin);
  begin_->record(stream);
}

void DeviceOperation::record_end(const c10::Stream& stream) {
  stream_ = stream;
  end_->record(stream);
}

std::chrono::nanoseconds DeviceOperation::device_time() const {
  if (!begin_) return std::chrono::nanoseconds(0);
  const std::chrono::duration<double, std::milli> time(begin_->elapsedTime(*end_));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time);
}

void DeviceOperation::order(const c10::Stream& stream) {
  if (stream_ != stream) end_->block(stream);
  if (!may_hold_.load()) return;
  std::optional<Held> released;  // ends without the lock: tensors may run deleters of their own
  const std::lock_guard lock(mutex_);
  if (held_ && held_->caller == stream) released = std::exchange(held_, std::nullopt);
}

void DeviceOperation::let_go() {
  if (!may_hold_.load()) return;
  std::optional<Held> released;
  const std::lock_guard lock(mutex_);
  released = std::exchange(held_, std::nullopt);
}

}  // namespace libddp
