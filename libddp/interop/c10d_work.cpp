#include "libddp/interop/c10d_work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "libddp/interop/torch_errors.h"

namespace libddp {
namespace {

using Lists = std::vector<std::vector<at::Tensor>>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// torch's convention: a list of tensors, or a list of such lists where there are several.
c10::TypePtr type_of(const Lists& results) {
  auto tensors = c10::ListType::create(c10::TensorType::get());
  return results.size() > 1 ? c10::ListType::create(tensors) : tensors;
}

c10::IValue value_of(const Lists& results) {
  if (results.size() > 1) return c10::IValue(results);
  return c10::IValue(results.empty() ? std::vector<at::Tensor>() : results[0]);
}

void complete(const FuturePtr& future, const Lists& results, const std::exception_ptr& error) {
  if (error) {
    future->setError(error_for_torch(error));
  } else {
    future->markCompleted(value_of(results));
  }
}

/// Until the work is done to everybody: who has waited for its future may ask the work.
void settle(const std::weak_ptr<libddp::Work>& ending) {
  const WorkPtr work = ending.lock();
  while (work && !work->is_completed()) {
    try {
      work->wait();
    } catch (...) {
      // Its own error, which the future tells, or an interrupt, which is not for this thread.
      continue;
    }
  }
}

}  // namespace

C10dWork::C10dWork(c10d::OpType type, const ProcessGroup& group)
    : c10d::Work(group.rank(), type), group_(&group), sequence_(group.sequence_number()) {}

void C10dWork::attach(WorkPtr work, Lists results) {
  if (!work->is_stream_ordered()) callbacks_ = CallbackThread::of(group_);
  work_ = std::move(work);
  results_ = std::move(results);
}

bool C10dWork::isCompleted() { return work_->is_completed(); }

bool C10dWork::isSuccess() const { return work_->is_completed() && !work_->exception(); }

std::exception_ptr C10dWork::exception() const { return error_for_torch(work_->exception()); }

int C10dWork::sourceRank() const { return work_->source_rank(); }

std::vector<at::Tensor> C10dWork::result() {
  TORCH_CHECK(results_.size() <= 1,
              "libddp: result() knows no list of lists. Hint: use get_future().value().");
  return results_.empty() ? std::vector<at::Tensor>() : results_[0];
}

void C10dWork::synchronize() {
  if (work_->is_stream_ordered()) for_torch([&] { work_->wait(); });
}

bool C10dWork::wait(std::chrono::milliseconds timeout) {
  for_torch([&] {
    if (timeout == kNoTimeout) {
      work_->wait();
    } else {
      work_->wait(timeout);
    }
  });
  return true;
}

FuturePtr C10dWork::getFuture() {
  std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  if (work_->is_stream_ordered()) {
    complete_in_stream();
    return future_;
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(type_of(results_));
  if (work_->is_completed()) {
    complete(future_, results_, work_->exception());  // nobody has added a callback yet
    return future_;
  }
  work_->on_complete([future = future_, results = results_, callbacks = callbacks_,
                      weak = std::weak_ptr<libddp::Work>(work_)](libddp::Work& work) {
    callbacks->post([future, results, weak, error = work.exception()] {
      settle(weak);
      complete(future, results, error);
    });
  });
  return future_;
}

// A future notes the current stream of its devices when it is completed.
void C10dWork::complete_in_stream() {
  const c10::Device device = work_->device();
  future_ =
      c10::make_intrusive<c10::ivalue::Future>(type_of(results_), std::vector<c10::Device>{device});
  const c10::DeviceGuard current(device);
  const c10::StreamGuard side(
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  try {
    work_->wait();
    future_->markCompleted(value_of(results_));
  } catch (...) {
    future_->setError(error_for_torch(std::current_exception()));
  }
}

}  // namespace libddp
