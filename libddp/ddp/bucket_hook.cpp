#include "libddp/ddp/bucket_hook.h"

#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/group/group_identity.h"

namespace libddp {
namespace {

c10d::GradBucket grad_bucket(const GradientBuckets& buckets, std::size_t bucket,
                             const NamedTensors& parameters) {
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> tensors;
  for (const std::size_t index : buckets.members(bucket)) {
    const at::Tensor& parameter = parameters[index].tensor;
    lengths.push_back(static_cast<std::size_t>(parameter.numel()));
    sizes.push_back(parameter.sizes());
    tensors.push_back(parameter);
  }
  return c10d::GradBucket(bucket, buckets.size(), buckets.gradients(bucket),
                          buckets.offsets(bucket), std::move(lengths), std::move(sizes),
                          std::move(tensors), std::nullopt);
}

/// Shared with a future's callback, which may come after the wait has ended.
struct Arrival {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_there = false;
};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace

BucketHook::BucketHook(std::shared_ptr<c10d::CommHookInterface> hook, Group group)
    : hook_(std::move(hook)), group_(std::move(group)) {}

template <typename Function>
void BucketHook::or_abort(const GradientBuckets& buckets, std::size_t bucket, Function&& function) {
  try {
    function();
  } catch (...) {
    group_->abort(fmt::format("the communication hook failed for {}: {}", buckets.label(bucket),
                              text_of(std::current_exception())));
    throw;
  }
}

void BucketHook::start(const GradientBuckets& buckets, std::size_t bucket,
                       const NamedTensors& parameters) {
  // A pass that failed half-way has left its future here.
  if (bucket == 0) started_.reset();
  finish_started(buckets);
  or_abort(buckets, bucket, [&] {
    c10d::GradBucket given = grad_bucket(buckets, bucket, parameters);
    started_ = Started{bucket, hook_->runHook(given)};
  });
}

void BucketHook::finish_started(const GradientBuckets& buckets) {
  const std::optional<Started> started = std::exchange(started_, std::nullopt);
  if (started) or_abort(buckets, started->bucket, [&] { take_result(buckets, *started); });
}

void BucketHook::finish(GradientBuckets& buckets) {
  finish_started(buckets);
  if (group_->size() == 1) return;
  const at::Tensor flags = buckets.flags();
  group_->all_reduce(flags, {.op = ReduceOp::Max},
                     {.async = false, .timeout = {}, .label = "flags of the gradients"});
  buckets.set_flags(flags);
}

void BucketHook::take_result(const GradientBuckets& buckets, const Started& started) {
  wait(buckets, started);
  const at::Tensor result = hook_->parseHookResult(started.future->value());
  const at::Tensor gradients = buckets.gradients(started.bucket);
  if (result.numel() != gradients.numel()) {
    const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
    throw ArgumentError(fmt::format(
        "{} communication hook: it returned {} elements for {}, which has {}. Hint: return a "
        "tensor like bucket.buffer().",
        me.where(), result.numel(), buckets.label(started.bucket), gradients.numel()));
  }
  if (result.const_data_ptr() != gradients.const_data_ptr()) {
    gradients.copy_(result.reshape({-1}));
  }
}

void BucketHook::wait(const GradientBuckets& buckets, const Started& started) const {
  const auto arrival = std::make_shared<Arrival>();
  started.future->addCallback([arrival](c10::ivalue::Future& /*future*/) {
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
      const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
      throw TimeoutError(fmt::format(
          "{} communication hook: its future for {} was not completed within {:.1f} s. Hint: a "
          "hook must complete the future that it returns.",
          me.where(), buckets.label(started.bucket),
          std::chrono::duration<double>(group_->timeout()).count()));
    }
    lock.lock();
  }
  if (started.future->hasError()) std::rethrow_exception(started.future->exception_ptr());
}

}  // namespace libddp
