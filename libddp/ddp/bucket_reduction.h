#pragma once

// Sends complete buckets and takes their averages: by the group's all-reduce, by reduce-scatters
// where averages are sharded, or through a communication hook. A group of one rank sends nothing.
//
// Thread rule: as Reducer; collective order: the order of `start`, then `finish`.
//
//   BucketReduction reduction(group, sharded);
//   reduction.start(buckets, 0, parameters, {.async = true, .scatters = false});
//   reduction.finish(buckets, [&](std::size_t bucket, std::int64_t finished_ns) { ... });

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/ddp/bucket_hook.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/sharded_averages.h"
#include "libddp/ddp/sparse_gradients.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class BucketReduction {
 public:
  struct How {
    bool async = false;
    /// This rank gets the averages of its own block only.
    bool scatters = false;
  };
  /// A bucket has its result; when that was, on monotonic_ns().
  using OnResult = std::function<void(std::size_t bucket, std::int64_t finished_ns)>;

  /// `sharded`: of the Reducer, which outlives this.
  BucketReduction(Group group, const ShardedAverages& sharded);
  BucketReduction(const BucketReduction&) = delete;
  BucketReduction& operator=(const BucketReduction&) = delete;
  ~BucketReduction() { forget(); }

  /// Throws StateError where there is a hook, or another exchange that none goes together with.
  void check_may_have_hook() const;
  /// From now on a hook takes each bucket; see bucket_hook.h for the arguments.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook, std::size_t num_alone,
                std::function<void(std::size_t bucket)> on_result);
  bool has_hook() const { return hook_.has_value(); }
  /// Null where there is none.
  std::shared_ptr<c10d::CommHookInterface> hook() const { return hook_ ? hook_->hook() : nullptr; }
  /// Whether somebody takes what stands in the buckets when they are sent: not where this rank is
  /// alone and has no hook.
  bool reads_buckets() const { return !is_alone_ || hook_ || sharded_.has_owners(); }
  /// Whether the flags of `buckets` are those of all ranks when they have been averaged.
  bool averages_flags(const GradientBuckets& buckets, bool scatters) const {
    return buckets.has_tails() && !hook_ && !scatters;
  }
  /// What has failed in the hook, for errors, or "".
  std::string hook_failure() const { return hook_ ? hook_->failure() : std::string(); }
  /// Multiplies the averages to come.
  void set_scale(double scale) { scale_ = scale; }

  /// Sends a bucket. False where it is known to be done already.
  bool start(const GradientBuckets& buckets, std::size_t bucket, const NamedTensors& parameters,
             How how);
  /// Waits for all that was sent: the buckets have averages then. On a device the current stream
  /// waits, and when a bucket has got its result is not known.
  void finish(const GradientBuckets& buckets, const OnResult& on_result);
  /// The same for gradients without a bucket: see SparseGradients.
  bool average(SparseGradients& sparse, const std::vector<SparseGradients::Share>& shares,
               std::size_t num_buckets);
  /// Drops what a pass that failed half-way has left. On a device the current stream waits for it:
  /// the buckets are written again, or go.
  void forget();

 private:
  const Group group_;
  /// Nothing is sent.
  const bool is_alone_;
  double scale_ = 1.0;
  const ShardedAverages& sharded_;
  std::optional<BucketHook> hook_;
  /// By bucket; null unless its communication is in flight.
  std::vector<WorkPtr> works_;
};

}  // namespace libddp
