#pragma once

// Sends buckets through a communication hook instead of averaging them: torch's interface
// (c10d::CommHookInterface), so that torch's own hooks and those written for torch run unchanged.
//
// A hook gets the gradients of one bucket, without libddp's flags, and returns a future of what
// shall stand there; dividing by the world size is its own business. Hooks run one after the other,
// in the order of the buckets, beside the backward pass: a hook may chain several collectives
// (PowerSGD does), and those of two buckets must not mix differently on different ranks. The end
// of the pass waits for the last one. The flags travel apart from them (ParameterUsage::share).
//
// A hook that fails is an exception of the backward pass like any other: where the others wait for
// this rank, inside their own hooks or at the end, they hear of it (NOTE [Reported errors]), and
// where all ranks fail alike and catch it, the group is what it was.
//
// Thread rule: as Reducer.
//
//   BucketHook hook(std::make_shared<MyHook>(), group);
//   hook.start(buckets, 0, parameters);
//   hook.finish(buckets);

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "libddp/ddp/gradient_buckets.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace c10d {
class CommHookInterface;
}

namespace libddp {

class BucketHook {
 public:
  /// `num_alone`: parameters without a bucket, which `run_alone` gets in each pass. `on_result`:
  /// called when the result of a bucket has been taken.
  BucketHook(std::shared_ptr<c10d::CommHookInterface> hook, Group group, std::size_t num_alone = 0,
             std::function<void(std::size_t bucket)> on_result = nullptr);

  /// Waits for the hook of the bucket before, then runs the hook on this complete bucket. Throws
  /// what the hook or the future before throws.
  void start(const GradientBuckets& buckets, std::size_t bucket, const NamedTensors& parameters);
  /// Drops what a pass that failed half-way has left.
  void forget();
  const std::shared_ptr<c10d::CommHookInterface>& hook() const { return hook_; }
  /// What has failed since then, for errors: "the communication hook failed for bucket 3 (...): ";
  /// or "".
  const std::string& failure() const { return failure_; }
  /// Waits for the hook that was started last and puts its result into the bucket. Throws what a
  /// future holds, TimeoutError where one does not come within the group's timeout, ArgumentError
  /// where the result has another number of elements.
  void finish(const GradientBuckets& buckets);
  /// For a parameter without a bucket: runs the hook on `gradient` (sparse COO, or dense in the
  /// parameter's shape) as if it were a bucket behind the `num_buckets` true ones, and waits. The
  /// hook may write into it. `position`: of the parameter among those without a bucket.
  /// Returns what shall stand in `.grad`: sparse and coalesced, or dense. Throws as `finish`, and
  /// ArgumentError where the result has another shape.
  at::Tensor run_alone(const at::Tensor& gradient, std::size_t position, std::size_t num_buckets,
                       const NamedTensor& parameter);

 private:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;
  struct Started {
    std::size_t bucket;
    Future future;
  };

  void take_result(const GradientBuckets& buckets, const Started& started);
  /// `label`: the bucket in errors.
  at::Tensor result_of(const Future& future, const std::string& label);
  void wait(const Future& future, const std::string& label) const;
  void block_until_completed(const Future& future, const std::string& label) const;
  /// The group and this rank in it, for errors.
  std::string where() const;
  [[noreturn]] void refuse_result(const at::Tensor& result, const at::Tensor& given,
                                  const std::string& label) const;
  template <typename Function>
  void named(const std::string& label, Function&& function);

  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const Group group_;
  const std::size_t num_alone_;
  const std::function<void(std::size_t)> on_result_;
  std::optional<Started> started_;
  std::string failure_;
};

}  // namespace libddp
