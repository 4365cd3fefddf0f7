#include "libddp/ddp/sharded_averages.h"

#include <c10/core/GradMode.h>

#include <utility>

namespace libddp {

void ShardedAverages::begin(bool scatters) {
  has_owners_ = true;
  scatters_ = scatters;
}

WorkPtr ShardedAverages::average(const GradientBuckets& buckets, std::size_t bucket,
                                 ReduceOptions reduce, CallOptions call) const {
  return group_->reduce_scatter_into(buckets.block(bucket, group_->rank()),
                                     buckets.gradients(bucket), reduce, std::move(call));
}

void ShardedAverages::share_flags(GradientBuckets& buckets) const {
  if (group_->size() == 1 || buckets.size() == 0) return;
  const at::Tensor flags = buckets.flags();
  group_->all_reduce(flags, {.op = ReduceOp::Max},
                     {.async = false, .timeout = {}, .label = "flags of the gradients"});
  buckets.set_flags(flags);
}

void ShardedAverages::spread(GradientSlots& slots, const GradientBuckets& buckets) const {
  const c10::NoGradGuard no_grad;
  const int rank = group_->rank();
  for (std::size_t index = 0; index < slots.size(); ++index) {
    if (!slots.take_averaged_in_part(index)) continue;
    const ElementRange own = buckets.owned(index, rank);
    const at::Tensor whole = buckets.flat_view(index);
    whole.narrow(0, 0, own.begin).zero_();
    whole.narrow(0, own.begin, own.numel()).mul_(group_->size());
    whole.narrow(0, own.end, whole.numel() - own.end).zero_();
  }
}

}  // namespace libddp
