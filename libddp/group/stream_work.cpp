#include "libddp/group/stream_work.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/first_line.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/group/current_stream.h"

namespace libddp {
namespace {

constexpr std::chrono::microseconds kPauseStep{5};
constexpr std::chrono::microseconds kLongestPause{500};

}  // namespace

StreamWork::StreamWork(std::shared_ptr<DeviceOperation> operation, std::vector<at::Tensor> results,
                       c10::Device device, Wait wait, Finisher finisher)
    : Work(operation->description, operation->sequence, std::move(results)),
      operation_(std::move(operation)),
      device_(device),
      wait_(wait),
      finisher_(std::move(finisher)) {}

void StreamWork::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (wait_ == Wait::Host) return block_host(timeout);
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  operation_->order(current_stream_on(device_));
}

void StreamWork::order_stream() noexcept {
  if (wait_ == Wait::Host) return;
  try {
    operation_->order(current_stream_on(device_));
  } catch (const std::exception&) {
    // The device's own error, which whoever uses it next is told; its memory stays held.
    log(LogLevel::Debug, "stream_not_ordered",
        {{"operation", description()}, {"error", first_line_of(std::current_exception())}});
  }
}

void StreamWork::synchronize() { block_host(std::nullopt); }

// By asking, not by the device's own wait: a group that fails meanwhile, and Ctrl-C, end it.
void StreamWork::block_host(std::optional<std::chrono::milliseconds> timeout) {
  const Deadline deadline = timeout ? Deadline::after(*timeout) : Deadline::never();
  std::chrono::microseconds pause{0};
  while (!is_completed()) {
    check_interrupt();
    if (deadline.expired()) refuse_to_wait(*timeout);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause + kPauseStep, kLongestPause);
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
}

bool StreamWork::is_completed() const { return is_finished() || operation_->is_done(); }

void StreamWork::on_complete(std::function<void(Work&)> callback) {
  // The Work is its user's, who may let go of it before the end.
  const auto self = shared_from_this();
  Work::on_complete([callback = std::move(callback), self](Work& work) { callback(work); });
  if (finisher_ && !is_finished()) finisher_(self);
}

}  // namespace libddp
