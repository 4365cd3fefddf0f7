#pragma once

// Sends the buckets of a pass in their order, the same on every rank: those that are complete while
// the pass still runs, what is left at its end.
//
// The last bucket is left to the end of the pass, which waits for it anyway: an inline call there
// spares the hand-over to another thread.
// Thread rule: `launch_complete` from any thread of the pass, the rest as Reducer.
//
//   BucketLauncher launcher(group, {parameters, pass, buckets, usage, reduction, timeline}, false);
//   if (pass.mark_ready(bucket)) launcher.launch_complete();
//   launcher.launch_rest(false);                 // the pass ends
//   const bool is_missing = launcher.collect();

#include <cstddef>
#include <mutex>

#include "libddp/ddp/backward_pass.h"
#include "libddp/ddp/bucket_reduction.h"
#include "libddp/ddp/finite_check.h"
#include "libddp/ddp/learned_buckets.h"
#include "libddp/ddp/parameter_usage.h"
#include "libddp/ddp/pass_timeline.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class BucketLauncher {
 public:
  /// Of the Reducer, which outlive this.
  struct Parts {
    const NamedTensors& parameters;
    BackwardPass& pass;
    LearnedBuckets& buckets;
    ParameterUsage& usage;
    BucketReduction& reduction;
    PassTimeline& timeline;
  };

  /// `skips_unused`: see ReducerOptions::skip_unused_buckets.
  BucketLauncher(Group group, Parts parts, bool skips_unused);

  /// Sends those that are next and complete, but the last one. Throws StateError where gradients
  /// are checked (finite_check.h) and one is not finite.
  void launch_complete();
  /// Sends what is left; nothing where that has been done in this pass. Throws the same.
  void launch_rest(bool last_is_async);
  /// Waits for all of them; a collective. Returns whether some rank has no gradient for some
  /// parameter.
  bool collect();

 private:
  void launch(std::size_t bucket, bool async);
  void refuse_non_finite(std::size_t bucket);

  const Group group_;
  const Parts parts_;
  const bool skips_unused_;
  const bool checks_gradients_ = checks_gradients();
  std::mutex mutex_;
};

}  // namespace libddp
