#pragma once

// Sends buckets through a communication hook instead of averaging them: torch's interface
// (c10d::CommHookInterface), so that torch's own hooks and those written for torch run unchanged.
//
// A hook gets the gradients of one bucket, without libddp's flags, and returns a future of what
// shall stand there; dividing by the world size is its own business. Hooks run one after the other,
// in the order of the buckets, beside the backward pass: a hook may chain several collectives
// (PowerSGD does), and those of two buckets must not mix differently on different ranks. The end
// of the pass waits for the last one and then exchanges the flags in one message.
//
// A hook that fails on one rank leaves the others waiting inside their own, so the group is
// aborted: each rank gets an error, and the group cannot be used any more.
//
// Thread rule: as Reducer.
//
//   BucketHook hook(std::make_shared<MyHook>(), group);
//   hook.start(buckets, 0, parameters);
//   hook.finish(buckets);

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/named_tensor.h"
#include "libddp/group/process_group.h"

namespace c10d {
class CommHookInterface;
}

namespace libddp {

class BucketHook {
 public:
  BucketHook(std::shared_ptr<c10d::CommHookInterface> hook, Group group);

  /// Waits for the hook of the bucket before, then runs the hook on this complete bucket. Throws
  /// what the hook or the future before throws.
  void start(const GradientBuckets& buckets, std::size_t bucket, const NamedTensors& parameters);
  /// Collective: waits for the hooks that were started, puts their results into the buckets, and
  /// makes the flags of all buckets those of all ranks. Throws what a future holds, TimeoutError
  /// where one does not come within the group's timeout, ArgumentError where the result has another
  /// number of elements.
  void finish(GradientBuckets& buckets);

 private:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;
  struct Started {
    std::size_t bucket;
    Future future;
  };

  void finish_started(const GradientBuckets& buckets);
  void take_result(const GradientBuckets& buckets, const Started& started);
  void wait(const GradientBuckets& buckets, const Started& started) const;
  template <typename Function>
  void or_abort(const GradientBuckets& buckets, std::size_t bucket, Function&& function);

  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const Group group_;
  std::optional<Started> started_;
};

}  // namespace libddp
