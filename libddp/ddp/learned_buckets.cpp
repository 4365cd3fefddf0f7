#include "libddp/ddp/learned_buckets.h"

#include <utility>

#include "libddp/ddp/bucket_layout.h"
#include "libddp/memory/empty_cache.h"

namespace libddp {

LearnedBuckets::LearnedBuckets(Group group, Parts parts, BucketLimits limits)
    : group_(std::move(group)),
      parts_(parts),
      order_(sizes_of(parts_.parameters), std::move(limits), parts_.sparse.indices()) {
  build(order_.first_plan());
}

void LearnedBuckets::build(BucketPlan plan) {
  buckets_ = nullptr;
  for (GradientSlot& slot : parts_.slots) slot.leave_bucket();
  buckets_ = std::make_shared<GradientBuckets>(*group_, parts_.parameters, order_.sizes(),
                                               std::move(plan), parts_.usage.tolerates_unused(),
                                               parts_.sharded.num_owners(), is_packed_);
  for (std::size_t index = 0; index < parts_.slots.size(); ++index) {
    if (!parts_.sparse.contains(index)) parts_.slots[index].move_to(buckets_->view(index));
  }
  parts_.slots.moved();
  // What the last ones had and these don't fit into, and what the model came through when it was
  // wrapped: no step asks for that again.
  empty_cache();
  describe_layout();
}

void LearnedBuckets::describe_layout() {
  BucketLayout layout =
      describe_buckets(*group_, parts_.parameters, *buckets_, order_.is_learned());
  layout.is_torchs = order_.is_torchs();
  for (const std::size_t index : parts_.sparse.indices()) {
    layout.sparse_names.push_back(parts_.parameters[index].name);
  }
  parts_.timeline.set_layout(std::make_shared<const BucketLayout>(std::move(layout)));
}

void LearnedBuckets::rebuild() { build(order_.has_plan() ? order_.take_plan() : buckets_->plan()); }

void LearnedBuckets::pack() {
  is_packed_ = true;
  build(order_.first_plan());
}

void LearnedBuckets::rebuild_as_learned() {
  if (order_.has_plan() && !std::exchange(waits_, false)) rebuild();
}

void LearnedBuckets::learn(bool has_static_graph) {
  if (order_.is_torchs() && parts_.usage.tolerates_unused() && !has_static_graph) {
    order_.keep();
  } else {
    order_.learn(*group_, buckets_->plan());
    // Of a static graph torch learns it in the second pass.
    waits_ = order_.is_torchs() && has_static_graph;
  }
  // The gradients move along.
  if (parts_.sharded.has_owners()) rebuild_as_learned();
  describe_layout();
}

void LearnedBuckets::follow_dtypes() {
  order_.restart(sizes_of(parts_.parameters));
  build(order_.first_plan());
}

}  // namespace libddp
