#include "libddp/ddp/compress_hook.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <map>
#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "libddp/base/error.h"
#include "libddp/group/required_group.h"
#include "libddp/group/sparse_all_reduce.h"

namespace libddp {
namespace {

class CompressHook final : public c10d::CommHookInterface {
 public:
  CompressHook(Group group, c10::ScalarType dtype) : group_(std::move(group)), dtype_(dtype) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor buffer = bucket.getBuffer();
    if (buffer.is_sparse()) return average_sparse(buffer);
    const at::Tensor small = small_buffer(bucket.getIndex(), buffer);
    small.copy_(buffer);
    if (!buffer.is_cpu()) return average_on_device(buffer, small);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    const WorkPtr work =
        group_->all_reduce(small, {.op = ReduceOp::Avg},
                           {.async = true, .timeout = {}, .label = "compressed gradients"});
    work->on_complete([future, buffer, small](Work& done) {
      if (const std::exception_ptr error = done.exception()) return future->setError(error);
      buffer.copy_(small);
      future->markCompleted(buffer);
    });
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

  c10::ScalarType dtype() const { return dtype_; }

 private:
  /// Complete once all is launched, and in the order of a stream of its own behind the average: the
  /// backward pass goes on beside it.
  c10::intrusive_ptr<c10::ivalue::Future> average_on_device(const at::Tensor& buffer,
                                                            const at::Tensor& small) {
    const c10::Device device = buffer.device();
    const WorkPtr work =
        group_->all_reduce(small, {.op = ReduceOp::Avg},
                           {.async = true, .timeout = {}, .label = "compressed gradients"});
    if (!stream_) {
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    }
    const c10::StreamGuard guard(*stream_);
    work->wait();
    buffer.copy_(small);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(),
                                                           std::vector<c10::Device>{device});
    future->markCompleted(buffer);
    return future;
  }
  c10::intrusive_ptr<c10::ivalue::Future> average_sparse(const at::Tensor& gradient) {
    const std::vector<at::Tensor> means =
        sparse_sums(*group_, {gradient.to(dtype_)}, 1.0 / group_->size(),
                    {.async = false, .timeout = {}, .label = "compressed sparse gradients"});
    std::vector<c10::Device> devices;
    if (!gradient.device().is_cpu()) devices.push_back(gradient.device());
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
    future->markCompleted(means.front().to(gradient.scalar_type()));
    return future;
  }
  /// Kept from step to step, where the group communicates fastest.
  const at::Tensor& small_buffer(std::size_t bucket, const at::Tensor& buffer) {
    at::Tensor& kept = small_[bucket];
    if (!kept.defined() || kept.numel() != buffer.numel()) {
      kept = group_->allocate({buffer.numel()}, dtype_, buffer.device());
    }
    return kept;
  }

  const Group group_;
  const c10::ScalarType dtype_;
  std::map<std::size_t, at::Tensor> small_;
  /// Of a device: where averages are converted back.
  std::optional<c10::Stream> stream_;
};

}  // namespace

std::shared_ptr<c10d::CommHookInterface> compress_hook(Group group, c10::ScalarType dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    throw ArgumentError(
        fmt::format("libddp: gradients cannot be compressed to {}. Hint: use half or bfloat16.",
                    c10::toString(dtype)));
  }
  return std::make_shared<CompressHook>(required_group(std::move(group), "compress_hook"), dtype);
}

bool is_compress_hook(const c10d::CommHookInterface& hook) {
  return dynamic_cast<const CompressHook*>(&hook) != nullptr;
}

std::shared_ptr<c10d::CommHookInterface> over_group(
    const std::shared_ptr<c10d::CommHookInterface>& hook, Group group) {
  const auto* const compresses = dynamic_cast<const CompressHook*>(hook.get());
  return compresses == nullptr ? hook : compress_hook(std::move(group), compresses->dtype());
}

}  // namespace libddp
