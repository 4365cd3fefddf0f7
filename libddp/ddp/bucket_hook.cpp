#include "libddp/ddp/bucket_hook.h"

#include <ATen/ops/view_as_complex.h>
#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"
#include "libddp/base/interrupt.h"

namespace libddp {
namespace {

c10d::GradBucket grad_bucket(const GradientBuckets& buckets, std::size_t bucket,
                             const NamedTensors& parameters, std::size_t num_alone) {
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> tensors;
  for (const std::size_t index : buckets.members(bucket)) {
    const at::Tensor& parameter = parameters[index].tensor;
    lengths.push_back(static_cast<std::size_t>(parameter.numel()));
    sizes.push_back(parameter.sizes());
    tensors.push_back(parameter);
  }
  return c10d::GradBucket(bucket, buckets.size() + num_alone, buckets.gradients(bucket),
                          buckets.offsets(bucket), std::move(lengths), std::move(sizes),
                          std::move(tensors), std::nullopt);
}

/// As torch has it: a sparse buffer is the gradient itself, and its parts have no offsets.
c10d::GradBucket grad_bucket(const at::Tensor& gradient, std::size_t bucket,
                             std::size_t num_buckets, const at::Tensor& parameter) {
  if (gradient.is_sparse()) {
    return c10d::GradBucket(bucket, num_buckets, gradient, {}, {}, {}, {parameter}, std::nullopt);
  }
  return c10d::GradBucket(bucket, num_buckets, gradient.view({-1}), {0},
                          {static_cast<std::size_t>(gradient.numel())}, {parameter.sizes()},
                          {parameter}, std::nullopt);
}

/// The future of a complex all-reduce has pairs of reals.
at::Tensor as_given(const at::Tensor& result, const at::Tensor& given) {
  const bool is_pairs = given.is_complex() && !result.is_complex() && !result.is_sparse() &&
                        result.numel() == 2 * given.numel();
  return is_pairs ? at::view_as_complex(result.reshape({-1, 2})) : result;
}

/// Shared with a future's callback, which may come after the wait has ended.
struct Arrival {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_there = false;
};

}  // namespace

BucketHook::BucketHook(std::shared_ptr<c10d::CommHookInterface> hook, Group group,
                       std::size_t num_alone, std::function<void(std::size_t)> on_result)
    : hook_(std::move(hook)),
      group_(std::move(group)),
      num_alone_(num_alone),
      on_result_(std::move(on_result)) {}

// Not what it throws: that keeps its type.
template <typename Function>
void BucketHook::named(const std::string& label, Function&& function) {
  try {
    function();
  } catch (...) {
    failure_ = fmt::format("the communication hook failed for {}: ", label);
    throw;
  }
}

void BucketHook::forget() {
  started_.reset();
  failure_.clear();
}

void BucketHook::start(const GradientBuckets& buckets, std::size_t bucket,
                       const NamedTensors& parameters) {
  finish(buckets);
  named(buckets.label(bucket), [&] {
    c10d::GradBucket given = grad_bucket(buckets, bucket, parameters, num_alone_);
    started_ = Started{bucket, hook_->runHook(given)};
  });
}

void BucketHook::finish(const GradientBuckets& buckets) {
  const std::optional<Started> started = std::exchange(started_, std::nullopt);
  if (!started) return;
  named(buckets.label(started->bucket), [&] { take_result(buckets, *started); });
}

at::Tensor BucketHook::run_alone(const at::Tensor& gradient, std::size_t position,
                                 std::size_t num_buckets, const NamedTensor& parameter) {
  const std::size_t bucket = num_buckets + position;
  const std::string label = fmt::format("bucket {} ({})", bucket, parameter.name);
  at::Tensor result;
  named(label, [&] {
    c10d::GradBucket given =
        grad_bucket(gradient, bucket, num_buckets + num_alone_, parameter.tensor);
    result = as_given(result_of(hook_->runHook(given), label), gradient);
    const bool fits = result.is_sparse() ? result.sizes() == gradient.sizes()
                                         : result.numel() == gradient.numel();
    if (!fits) refuse_result(result, gradient, label);
  });
  return result.is_sparse() ? result.coalesce() : result.reshape(gradient.sizes());
}

void BucketHook::take_result(const GradientBuckets& buckets, const Started& started) {
  const std::string& label = buckets.label(started.bucket);
  const at::Tensor gradients = buckets.gradients(started.bucket);
  const at::Tensor result = as_given(result_of(started.future, label), gradients);
  if (result.numel() != gradients.numel()) refuse_result(result, gradients, label);
  if (result.const_data_ptr() != gradients.const_data_ptr()) {
    gradients.copy_(result.reshape({-1}));
  }
  if (on_result_) on_result_(started.bucket);
}

std::string BucketHook::where() const {
  return GroupIdentity{group_->name(), group_->rank(), group_->size()}.where();
}

void BucketHook::refuse_result(const at::Tensor& result, const at::Tensor& given,
                               const std::string& label) const {
  throw ArgumentError(fmt::format(
      "{} communication hook: it returned {} elements for {}, which has {}. Hint: return a "
      "tensor like bucket.buffer().",
      where(), result.numel(), label, given.numel()));
}

at::Tensor BucketHook::result_of(const Future& future, const std::string& label) {
  wait(future, label);
  return hook_->parseHookResult(future->value());
}

// One on a device is complete when its operations have been launched: the current stream waits for
// them, the host does not.
void BucketHook::wait(const Future& future, const std::string& label) const {
  if (!future) {
    throw ArgumentError(fmt::format(
        "{} communication hook: it returned no future for {}. Hint: return one whose value is a "
        "tensor like bucket.buffer().",
        where(), label));
  }
  if (!future->completed()) block_until_completed(future, label);
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  future->wait();
}

void BucketHook::block_until_completed(const Future& future, const std::string& label) const {
  const auto arrival = std::make_shared<Arrival>();
  future->addCallback([arrival](c10::ivalue::Future& /*future*/) {
    const std::lock_guard<std::mutex> lock(arrival->mutex);
    arrival->is_there = true;
    arrival->changed.notify_all();
  });
  const Deadline deadline = Deadline::after(group_->timeout());
  std::unique_lock<std::mutex> lock(arrival->mutex);
  while (!arrival->changed.wait_for(lock, kInterruptPeriod, [&] { return arrival->is_there; })) {
    lock.unlock();
    check_interrupt();
    if (const std::exception_ptr failure = group_->failure()) std::rethrow_exception(failure);
    if (deadline.expired()) {
      throw TimeoutError(fmt::format(
          "{} communication hook: its future for {} was not completed within {:.1f} s. Hint: a "
          "hook must complete the future that it returns.",
          where(), label, std::chrono::duration<double>(group_->timeout()).count()));
    }
    lock.lock();
  }
}

}  // namespace libddp
