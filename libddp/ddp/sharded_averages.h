#pragma once

// Buckets and averages for optimizers that share the work.
//
// A bucket is cut into one block per rank: what that rank updates. Averages are everybody's as ever
// (ZeRO-1). Where they are sharded too (ZeRO-2's exchange), a reduce-scatter in place leaves the
// averages of its own block to each rank, and its own gradients in the rest; the flags behind the
// gradients travel in a message of their own.
//
// NOTE [Gradients on top of averages]
// A script may run a second pass without clearing `.grad`: what stands there then is an average,
// which the new gradients are added to, and the sum is averaged again. An average that all ranks
// have stays what it is. One that only its owner has does so if the owner multiplies it by the
// number of ranks and the others set their part to zero; that is done when such a pass begins,
// before autograd adds to it. Where that moment is not seen (outputs that nobody knows), the first
// gradient that was added in place is refused.
// The first pass averages everything on all ranks, because the buckets get their shape at its end.
//
// Thread rule: as Reducer.
//
//   ShardedAverages sharded(group);
//   sharded.begin(true);                                   // from the next buckets on
//   GradientBuckets buckets(..., sharded.num_owners());
//   sharded.spread(slots, buckets);                        // before a pass adds to averages
//   WorkPtr work = sharded.average(buckets, 0, {.op = ReduceOp::Avg}, {.async = true});

#include <cstddef>

#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/gradient_slots.h"
#include "libddp/group/process_group.h"

namespace libddp {

class ShardedAverages {
 public:
  /// What a Reducer is when an optimizer asks to share its work.
  struct Asked {
    bool scatters = false;
    bool has_hook = false;
    bool has_sparse = false;
    bool is_in_pass = false;
    /// See ReducerOptions::gradient_as_bucket_view.
    bool as_bucket_view = true;
  };

  explicit ShardedAverages(Group group) : group_(std::move(group)) {}

  /// Throws StateError saying what is against it.
  void check_may_begin(const Asked& asked) const;
  /// Buckets are cut from now on; `scatters`: each rank gets its own averages only.
  void begin(bool scatters);
  bool has_owners() const { return has_owners_; }
  bool scatters() const { return scatters_; }
  int num_owners() const { return has_owners_ ? group_->size() : 1; }

  /// The average of the own block, in place.
  WorkPtr average(const GradientBuckets& buckets, std::size_t bucket, ReduceOptions reduce,
                  CallOptions call) const;
  /// Makes averages that only their owners have into shares of all ranks whose average they are.
  void spread(GradientSlots& slots, const GradientBuckets& buckets) const;

 private:
  const Group group_;
  bool has_owners_ = false;
  bool scatters_ = false;
};

}  // namespace libddp
