#include "libddp/ddp/sharded_averages.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"

namespace libddp {

void ShardedAverages::check_may_begin(const Asked& asked) const {
  const auto refuse = [](const char* why, const char* hint) {
    throw StateError(
        fmt::format("libddp: the optimizer's work cannot be shared: {}. Hint: {}.", why, hint));
  };
  if (has_owners_) {
    refuse("another optimizer shares it already", "wrap the model again for another one");
  }
  if (asked.has_hook) {
    refuse("a communication hook exchanges the gradients", "use an optimizer without shard_over");
  }
  if (asked.has_sparse) {
    refuse("some gradients are sparse", "use an optimizer without shard_over");
  }
  if (asked.is_in_pass) refuse("a backward pass runs", "make the optimizer before it");
  if (asked.scatters && !asked.as_bucket_view) {
    refuse("its gradients are no views of their buckets, of which it would share out the averages",
           "leave out gradient_as_bucket_view=False or shard_gradients");
  }
}

void ShardedAverages::begin(bool scatters) {
  has_owners_ = true;
  scatters_ = scatters;
}

WorkPtr ShardedAverages::average(const GradientBuckets& buckets, std::size_t bucket,
                                 ReduceOptions reduce, CallOptions call) const {
  return group_->reduce_scatter_into(buckets.block(bucket, group_->rank()),
                                     buckets.gradients(bucket), reduce, std::move(call));
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
  // Autograd adds to them on streams of its own.
  slots.moved();
}

}  // namespace libddp
