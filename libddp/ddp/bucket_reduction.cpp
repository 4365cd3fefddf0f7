#include "libddp/ddp/bucket_reduction.h"

#include <utility>

#include "libddp/base/error.h"

namespace libddp {

BucketReduction::BucketReduction(Group group, const ShardedAverages& sharded)
    : group_(std::move(group)),
      // Another library's group may know more than this about who is there.
      is_alone_(group_->size() == 1 && group_->backend_name().rfind("c10d:", 0) != 0),
      sharded_(sharded) {}

void BucketReduction::check_may_have_hook() const {
  if (sharded_.has_owners()) {
    throw StateError(
        "libddp: a communication hook cannot exchange the gradients of an optimizer whose work is "
        "shared. Hint: "
        "make the optimizer without shard_over.");
  }
  if (hook_) {
    throw StateError(
        "libddp: register_comm_hook or register_builtin_comm_hook can only be called once. Hint: "
        "wrap the model again to use another hook.");
  }
}

void BucketReduction::set_hook(std::shared_ptr<c10d::CommHookInterface> hook, std::size_t num_alone,
                               std::function<void(std::size_t)> on_result) {
  hook_.emplace(std::move(hook), group_, num_alone, std::move(on_result));
}

bool BucketReduction::start(const GradientBuckets& buckets, std::size_t bucket,
                            const NamedTensors& parameters, How how) {
  if (hook_) {
    hook_->start(buckets, bucket, parameters);
    return true;
  }
  if (is_alone_) return false;
  if (works_.size() < buckets.size()) works_.resize(buckets.size());
  const ReduceOptions average{.op = ReduceOp::Avg, .scale = scale_};
  CallOptions call{.async = how.async, .timeout = {}, .label = buckets.label(bucket)};
  works_[bucket] = how.scatters
                       ? sharded_.average(buckets, bucket, average, std::move(call))
                       : group_->all_reduce(buckets.flat(bucket), average, std::move(call));
  return how.async || works_[bucket]->is_stream_ordered();
}

void BucketReduction::finish(const GradientBuckets& buckets, const OnResult& on_result) {
  if (hook_) hook_->finish(buckets);
  for (std::size_t bucket = 0; bucket < works_.size(); ++bucket) {
    const WorkPtr work = std::exchange(works_[bucket], nullptr);
    if (!work) continue;
    work->wait();
    // The device may be done with it by chance; the watchdog's clock says little of when.
    const std::int64_t finished_ns = work->is_stream_ordered() ? 0 : work->finished_ns();
    if (finished_ns != 0) on_result(bucket, finished_ns);
  }
}

bool BucketReduction::average(SparseGradients& sparse,
                              const std::vector<SparseGradients::Share>& shares,
                              std::size_t num_buckets) {
  if (!hook_) return sparse.average(shares, scale_);
  return sparse.exchange(
      shares, [&](std::size_t position, const at::Tensor& own, const NamedTensor& parameter) {
        return hook_->run_alone(own, position, num_buckets, parameter);
      });
}

void BucketReduction::forget() {
  for (WorkPtr& work : works_) {
    if (const WorkPtr left = std::exchange(work, nullptr)) left->order_stream();
  }
  if (hook_) hook_->forget();
}

}  // namespace libddp
