#pragma once

// Averages gradients over the ranks while the backward pass still runs.
//
// Words: a pass is one backward pass; it synchronises if `prepare_for_backward` was called after
// its forward. A gradient fires when autograd has accumulated it. A bucket is complete when all of
// its gradients have fired; complete buckets are sent in plan order, the same on every rank, all
// but the last one asynchronously. The end of the pass sends what is left, the last bucket among
// it, and waits.
//
//   None --prepare_for_backward--> Armed --first gradient, or an output is reached--> Running
//   Running --end--> None
//
// Several forwards may share a pass, or have a pass each, or several (retain_graph): each pass
// averages what stands in `.grad` when it ends.
// A gradient costs one copy into its bucket and one counter: no lock, no dispatch. In the first
// pass that synchronises the true order of the gradients is learned; rank 0's order then decides
// the buckets of all ranks, once, from the next forward on.
// Parameters with sparse gradients have no bucket: the end of the pass averages them behind the
// buckets; see sparse_gradients.h.
// Gradients accumulate locally in passes that do not synchronise, in the same memory.
// Several reducers may have parameters in common (parameter_users.h). A gradient of such a one
// begins no pass where another reducer's pass runs over it: it belongs to that one's model.
// For an optimizer that shares its work (`shard`), the buckets are cut into one block per rank;
// with sharded averages too, a rank gets only those of its own blocks. See sharded_averages.h.
// The parts: a pass (backward_pass.h), the gradients that it has (gradient_slots.h) and lacks
// (parameter_usage.h), their buckets (learned_buckets.h), how these are sent (bucket_launcher.h)
// and averaged (bucket_reduction.h), passes that the caller ends (manual_finalization.h),
// exceptions (pass_errors.h). The Reducer says when each of them has its turn.
//
// NOTE [Threads of a pass]
// Autograd has a thread for each device, and the caller's for the CPU. A model on one device whose
// outputs are partly on the CPU (a loss, or logits that a script has moved there) is reached in two
// threads at once: both may begin the pass, and one may take gradients meanwhile. So where a
// parameter or an output is on a device, hooks run one at a time, under a lock that is hardly ever
// waited for. Models of the CPU need none.
//
// Thread rule: one forward or backward at a time; not to be destroyed during a backward pass.
//
//   auto reducer = Reducer::create(parameters, group, {});
//   auto loss = net->forward(x).sum();
//   reducer->prepare_for_backward({loss});
//   loss.backward();   // the average over all ranks stands in every .grad

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/ddp/backward_pass.h"
#include "libddp/ddp/bucket_launcher.h"
#include "libddp/ddp/bucket_plan.h"
#include "libddp/ddp/bucket_reduction.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/gradient_slots.h"
#include "libddp/ddp/learned_buckets.h"
#include "libddp/ddp/manual_finalization.h"
#include "libddp/ddp/parameter_usage.h"
#include "libddp/ddp/pass_errors.h"
#include "libddp/ddp/pass_timeline.h"
#include "libddp/ddp/sharded_averages.h"
#include "libddp/ddp/slow_rank_report.h"
#include "libddp/ddp/sparse_gradients.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

struct ReducerOptions {
  BucketLimits limits;
  /// Parameters may stay without a gradient, on some ranks or on all.
  bool find_unused_parameters = false;
  /// The graph is the same in each iteration: the first pass tells which parameters are used, and
  /// how often a gradient fires (reentrant checkpointing of shared weights).
  bool static_graph = false;
  /// Names of parameters whose gradients are expected to be sparse; others are ignored.
  std::vector<std::string> sparse_parameters{};
  /// Buckets without a used parameter are not sent. The ranks must use the same parameters; where
  /// they don't, the group names the bucket.
  bool skip_unused_buckets = false;
  /// Whether `.grad` is a piece of its bucket. If not, it is a tensor of its own, which a script
  /// may keep over the steps, and the bucket has a copy. None = it is, with the values of false:
  /// one that a script has given stays the tensor that it is and gets the average, and one that a
  /// pass reaches on no rank leaves its bucket and keeps its values. With true the one is replaced,
  /// and the other is the average of the ranks' values, or what a communication hook makes of them.
  std::optional<bool> gradient_as_bucket_view = std::nullopt;
  /// Called when a pass that synchronised has ended, well or not.
  std::function<void()> after_pass = nullptr;
  /// Throws the given error; lets a language binding throw a type of its own out of backward().
  std::function<void(std::exception_ptr)> rethrow = nullptr;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// `parameters`: those that require a gradient, the same on every rank.
  static std::shared_ptr<Reducer> create(NamedTensors parameters, Group group,
                                         ReducerOptions options);
  ~Reducer() = default;

  /// The next backward pass synchronises. `outputs`: what the forward returned, as far as known.
  /// Throws StateError where the last pass ended early, or this process has left the group; the
  /// group's failure where it has one.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  /// From the next forward on as if ReducerOptions::static_graph had been set. Before the first
  /// synchronising pass only.
  void set_static_graph();

  /// A whole pass of a rank that has no data while others have: contributes zeros, and takes part
  /// in everything that their pass does. Its `.grad`s hold the others' averages afterwards.
  void run_empty_pass();
  /// Multiplies the averages of the passes to come; the same on every rank. Without a hook only.
  void set_gradient_scale(double scale) { reduction_.set_scale(scale); }

  // Passes that the caller ends.
  /// If `manual`, the end of a pass sends what is left, and only `finalize_backward_manual` waits
  /// for it and puts the averages into place. Between passes.
  void set_manual_finalization(bool manual) { manual_.set(manual); }
  /// Once for each pass, when all gradients are there: at the earliest in a hook of the last one.
  void finalize_backward_manual();
  /// Whether only the end of the pass tells that all gradients are there.
  bool should_finalize_after_backward() const {
    return manual_.is_on() && (usage_.tolerates_unused() || needs_pass_end());
  }
  /// A backward pass raised `what`: where the others may wait for this model's gradients, they are
  /// told. For a caller that sees what autograd does not show here. Returns whether it was this
  /// model's, as far as is known here.
  bool backward_failed(const std::string& what) noexcept { return errors_.backward_failed(what); }

  /// Throws StateError where a pass has been sent and not been finished.
  void check_finalized() const { manual_.check_finalized(); }

  /// Follows parameters that have changed their dtype, for a while or for good: their hooks, and
  /// the buckets, in which the order of gradients is then learned anew. On every rank alike,
  /// between passes.
  void renew_hooks() { hooks_.renew(); }
  void follow_dtypes();
  /// Gradients of `dtype` are welcome too.
  void accept_gradients_of(at::ScalarType dtype);
  /// No other reducer may have parameters in common with this one.
  void claim_parameters() { slots_.claim(); }
  /// Throws StateError naming a parameter that is common although some reducer has claimed it.
  void check_users() const {
    slots_.check_users([this] { return where("forward"); });
  }

  /// From now on `hook` takes each bucket instead of the average; see bucket_hook.h. Once, and
  /// before the first synchronising pass, on every rank alike.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  /// Null where there is none.
  std::shared_ptr<c10d::CommHookInterface> comm_hook() const { return reduction_.hook(); }

  // Each rank owns a part of every bucket: see sharded_averages.h.
  /// From the next pass on (the one after, where none has synchronised yet) buckets have a block
  /// for each rank: GradientBuckets::block(bucket, rank). With `averages` this rank gets those of
  /// its blocks only, and the rest of `.grad` is this rank's own. Between passes, on every rank
  /// alike; once, and not with a hook or sparse gradients.
  void shard(bool averages);
  bool is_sharded() const { return sharded_.has_owners(); }
  /// Whether the buckets have got the shape that they keep, with blocks.
  bool has_blocks() const { return buckets_.has_blocks(); }
  /// Whether this rank gets only the averages of its own blocks.
  bool scatters_averages() const { return buckets_.scatters_averages(); }
  /// For the optimizer: throws StateError naming a parameter whose gradient has not been averaged.
  void check_averaged() const { slots_.check_averaged(); }
  /// After a forward whose backward does not synchronise.
  void prepare_for_local_backward(const std::vector<at::Tensor>& outputs);

  std::size_t num_buckets() const { return buckets().size(); }
  const GradientBuckets& buckets() const { return buckets_.current(); }
  std::shared_ptr<const GradientBuckets> shared_buckets() const { return buckets_.shared(); }
  const NamedTensors& parameters() const { return parameters_; }
  const Group& group() const { return group_; }
  /// What lies in which bucket now, and when what happened in the last passes.
  const BucketLayout& layout() const { return *timeline_.layout(); }
  const PassTimeline& timeline() const { return timeline_; }
  /// For whom this rank has waited, in parts of the time; see slow_rank.h.
  const std::vector<double>& wait_shares() const { return slow_ranks_.shares(); }
  /// The next pass begins with a collective that nothing overlapped with: this long.
  void add_exposed(std::int64_t ns) { slow_ranks_.add_exposed(ns); }
  /// Before a forward that may be armed: only for the timeline.
  void prepare_for_forward() { timeline_.begin_forward(); }

 private:
  using Stage = BackwardPass::Stage;
  /// How sure it is that the pass that was asked to tell its end is not nested in the true one.
  enum class PassEnd : std::uint8_t { Certain, MaybeNested };

  Reducer(NamedTensors parameters, Group group, ReducerOptions options);

  /// "libddp[group world, rank 0/2] backward", for errors.
  std::string where(const char* what) const;
  /// What is not as in torch, or not as one may think: once in a process, on rank 0.
  void tell_once(std::atomic<bool>& has_told, const char* event, const char* what) const;

  // The beginning of a pass.
  void ensure_prior_reduction_finished();
  void restart_pass(Stage stage);
  void on_output_reached(std::uint64_t& pass_of_forward);
  void begin_pass_at_output(bool is_again);
  void begin_pass(PassEnd end);
  void spread_averages();

  // The way of a gradient.
  void autograd_hook(std::size_t index);
  bool is_of_other_pass(std::size_t index) const;
  void check_create_graph(std::size_t index) const;
  void take(std::size_t index);
  void mark_ready(std::size_t index);

  // The end of a pass.
  void queue_finalization(PassEnd end);
  void on_pass_end(PassEnd end);
  void finalize_backward();
  void take_averages();
  void learn();
  bool is_complete() const;
  /// Whether something is to be done that no bucket tells the moment for.
  bool needs_pass_end() const { return options_.after_pass || !sparse_.indices().empty(); }
  class PassGuard;

  /// Of what autograd calls; see NOTE [Threads of a pass].
  std::unique_lock<std::mutex> lock_hooks();

  const NamedTensors parameters_;
  const Group group_;
  ReducerOptions options_;
  BackwardPass pass_;
  SparseGradients sparse_;
  GradientSlots slots_;
  ParameterUsage usage_;
  ShardedAverages sharded_;
  PassTimeline timeline_;
  LearnedBuckets buckets_;
  BucketReduction reduction_;
  BucketLauncher launcher_;
  ManualFinalization manual_;
  PassErrors errors_;
  SlowRankReport slow_ranks_;
  std::mutex hooks_mutex_;
  /// Whether parameters or outputs are, or have been, on a device.
  bool runs_beside_devices_ = false;
  /// Of the last forward; see call_before_backward.
  std::shared_ptr<void> output_leaves_;

  AccumulateHooks hooks_;  // last: destroyed first, so no hook runs into a half-destroyed object
};

}  // namespace libddp
