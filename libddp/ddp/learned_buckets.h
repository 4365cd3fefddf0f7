#pragma once

// The buckets of a Reducer over its life: built in the order that BucketOrder has at first, once
// more in the order that it has learned, and whenever they need flags, blocks or dtypes that they
// lack. The gradients move along with their values, and the timeline has a description of what lies
// where.
//
// Thread rule: as Reducer; everything but `current` between passes.
//
//   LearnedBuckets buckets(group, {parameters, sparse, usage, sharded, slots, timeline}, limits);
//   buckets.order().record(index);                                // in each gradient's hook
//   if (buckets.order().is_learning()) buckets.learn();           // at the end of a pass
//   buckets.rebuild_as_learned();                                 // from the next forward on

#include <cstddef>
#include <memory>

#include "libddp/ddp/bucket_order.h"
#include "libddp/ddp/bucket_plan.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/gradient_slots.h"
#include "libddp/ddp/parameter_usage.h"
#include "libddp/ddp/pass_timeline.h"
#include "libddp/ddp/sharded_averages.h"
#include "libddp/ddp/sparse_gradients.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class LearnedBuckets {
 public:
  /// Of the Reducer, which outlive this.
  struct Parts {
    const NamedTensors& parameters;
    const SparseGradients& sparse;
    const ParameterUsage& usage;
    const ShardedAverages& sharded;
    GradientSlots& slots;
    PassTimeline& timeline;
  };

  LearnedBuckets(Group group, Parts parts, BucketLimits limits);

  GradientBuckets& current() { return *buckets_; }
  const GradientBuckets& current() const { return *buckets_; }
  /// Keeps their memory.
  std::shared_ptr<const GradientBuckets> shared() const { return buckets_; }
  BucketOrder& order() { return order_; }
  const BucketOrder& order() const { return order_; }

  /// Whether they have got the shape that they keep, with blocks for the ranks.
  bool has_blocks() const { return parts_.sharded.has_owners() && !order_.is_learning(); }
  /// Whether a rank gets only the averages of its own blocks.
  bool scatters_averages() const { return parts_.sharded.scatters() && !order_.is_learning(); }

  /// Once more: with the flags and blocks that they need now, in the newest order.
  void rebuild();
  /// The same where a new order has been learned; to be called once in each pass.
  void rebuild_as_learned();
  /// Learns the order from the pass that ends; a collective. A communication hook with unused
  /// parameters keeps the order that it has, as with torch: what it does may hang on it (torchft,
  /// where a new replica meets others after their first pass).
  void learn(bool has_static_graph);
  /// From now on for a communication hook: see GradientBuckets. Before anything is learned.
  void pack();
  /// Parameters have other dtypes now: learns anew.
  void follow_dtypes();

 private:
  void build(BucketPlan plan);
  void describe_layout();

  const Group group_;
  const Parts parts_;
  BucketOrder order_;
  bool is_packed_ = false;
  /// For one pass more, a new order waits.
  bool waits_ = false;
  std::shared_ptr<GradientBuckets> buckets_;
};

}  // namespace libddp
