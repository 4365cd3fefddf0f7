#pragma once

// Averages gradients over the ranks while the backward pass still runs.
//
// Words: a pass is one backward pass; it synchronises if `arm` was called after its forward. A
// gradient fires when autograd has accumulated it. A bucket is complete when all of its gradients
// have fired; complete buckets are sent in plan order, the same on every rank, all but the last one
// asynchronously. The end of the pass sends what is left, the last bucket among it, and waits.
//
//   None --arm--> Armed --first gradient, or the pass reaches an output--> Running --end--> None
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
// with sharded averages too, a rank gets only those of its own blocks. See reducer_shards.cpp.
// Thread rule: one forward or backward at a time; not to be destroyed during a backward pass.
//
//   auto reducer = Reducer::create(parameters, group, {});
//   auto loss = net->forward(x).sum();
//   reducer->arm({loss});
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
#include "libddp/ddp/bucket_hook.h"
#include "libddp/ddp/bucket_plan.h"
#include "libddp/ddp/finite_check.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/gradient_slot.h"
#include "libddp/ddp/pass_timeline.h"
#include "libddp/ddp/reducer_pass.h"
#include "libddp/ddp/slow_rank.h"
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
  /// may keep over the steps, and the bucket has a copy.
  bool gradient_as_bucket_view = true;
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
  /// Throws StateError where the last pass ended early, the group's failure where it has one.
  void arm(const std::vector<at::Tensor>& outputs);

  /// From the next forward on as if ReducerOptions::static_graph had been set. Before the first
  /// synchronising pass only.
  void set_static_graph();

  /// A whole pass of a rank that has no data while others have: contributes zeros, and takes part
  /// in everything that their pass does. Its `.grad`s hold the others' averages afterwards.
  void run_empty_pass();
  /// Multiplies the averages of the passes to come; the same on every rank. Without a hook only.
  void set_gradient_scale(double scale) { gradient_scale_ = scale; }

  // reducer_manual.cpp: passes that the caller ends.
  /// If `manual`, the end of a pass sends what is left, and only `finish_backward` waits for it and
  /// puts the averages into place. Between passes.
  void set_manual_finish(bool manual);
  /// Once for each pass, when all gradients are there: at the earliest in a hook of the last one.
  void finish_backward();
  /// Whether only the end of the pass tells that all gradients are there.
  bool finishes_after_backward() const;
  /// A backward pass raised `what`: where the others may wait for this model's gradients, they are
  /// told. For a caller that sees what autograd does not show here. Returns whether it was this
  /// model's, as far as is known here.
  bool backward_failed(const std::string& what) noexcept;

  /// Throws StateError where a pass has been sent and not been finished.
  void check_finished() const;

  /// Follows parameters that have changed their dtype, for a while or for good: their hooks, and
  /// the buckets, in which the order of gradients is then learned anew. On every rank alike,
  /// between passes.
  void renew_hooks() { hooks_.renew(); }
  void follow_dtypes();
  /// Gradients of `dtype` are welcome too.
  void accept_gradients_of(at::ScalarType dtype);
  /// No other reducer may have parameters in common with this one.
  void claim_parameters();
  /// Throws StateError naming a parameter that is common although some reducer has claimed it.
  void check_users() const;

  /// From now on `hook` takes each bucket instead of the average; see bucket_hook.h. Once, and
  /// before the first synchronising pass, on every rank alike.
  void set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // reducer_shards.cpp: each rank owns a part of every bucket.
  /// From the next pass on (the one after, where none has synchronised yet) buckets have a block
  /// for each rank: GradientBuckets::block(bucket, rank). With `averages` this rank gets those of
  /// its blocks only, and the rest of `.grad` is this rank's own. Between passes, on every rank
  /// alike; once, and not with a hook or sparse gradients.
  void shard(bool averages);
  /// Whether the buckets have got the shape that they keep, with blocks.
  bool has_blocks() const { return has_owners_ && !is_learning_; }
  /// Whether this rank gets only the averages of its own blocks.
  bool scatters_averages() const { return scatters_averages_ && !is_learning_; }
  /// For the optimizer: throws StateError naming a parameter whose gradient has not been averaged.
  void check_averaged() const;
  /// After a forward whose backward does not synchronise.
  void arm_local_pass(const std::vector<at::Tensor>& outputs);

  std::size_t num_buckets() const { return buckets_->size(); }
  const GradientBuckets& buckets() const { return *buckets_; }
  std::shared_ptr<const GradientBuckets> shared_buckets() const { return buckets_; }
  const NamedTensors& parameters() const { return parameters_; }
  const Group& group() const { return group_; }
  /// What lies in which bucket now, and when what happened in the last passes.
  const BucketLayout& layout() const { return *timeline_.layout(); }
  const PassTimeline& timeline() const { return timeline_; }
  /// For whom this rank has waited, in parts of the time; see slow_rank.h.
  const std::vector<double>& wait_shares() const { return slow_ranks_.shares(); }
  /// The next pass begins with a collective that nothing overlapped with: this long.
  void add_exposed(std::int64_t ns) { exposed_before_ns_ += ns; }
  /// Before a forward that may be armed: only for the timeline.
  void begin_forward() { timeline_.begin_forward(); }

 private:
  using Stage = ReducerPass::Stage;
  using Told = ReducerPass::Told;
  /// What a parameter's `.grad` holds.
  enum class GradientState : std::uint8_t {
    /// What it held after the last synchronisation.
    Settled,
    /// Averages, in this rank's blocks only; see reducer_shards.cpp.
    AveragedInPart,
    /// Gradients of this rank, some of them added since.
    Own,
    /// Those too, and the bucket has a copy of them: the average is brought back from there.
    Copied,
  };
  /// How sure it is that the pass that was asked to tell its end is not nested in the true one.
  enum class PassEnd : std::uint8_t { Certain, MaybeNested };

  Reducer(NamedTensors parameters, Group group, ReducerOptions options);

  /// "libddp[group world, rank 0/2] backward", for errors.
  std::string where() const;

  // reducer.cpp: the way of a gradient.
  void on_gradient(std::size_t index);
  void count_gradient(std::size_t index);
  void on_output_reached(std::uint64_t& pass_of_forward);
  void begin_pass_at_output(bool is_again);
  void take(std::size_t index);
  void check_create_graph(std::size_t index) const;
  /// What is not as in torch, or not as one may think: once in a process, on rank 0.
  void tell_once(std::atomic<bool>& has_told, const char* event, const char* what) const;
  bool is_of_other_pass(std::size_t index) const;
  void begin_pass(PassEnd end);
  void queue_finish(PassEnd end);
  void launch_complete_buckets();
  void launch(std::size_t bucket, bool async);
  void fill(std::size_t bucket);
  void fill_without_gradient(std::size_t index);
  bool can_skip(std::size_t bucket) const;
  void refuse_second_gradient(std::size_t index) const;
  void refuse_non_finite(std::size_t bucket);

  // reducer_finish.cpp: the end of a pass.
  void on_pass_end(PassEnd end);
  void finish_pass();
  void send_rest(bool last_is_async);
  void take_averages();
  void watch_slow_ranks();
  bool collect_results();
  bool average_sparse_gradients();
  bool is_complete() const;
  /// Whether something is to be done that no bucket tells the moment for.
  bool needs_pass_end() const { return options_.after_pass || !sparse_.indices().empty(); }
  bool is_used(std::size_t index) const;
  bool has_own(std::size_t index) const;
  void settle();
  void refuse_unused();
  void install_gradients_of_others();
  void bring_back_copies();
  void learn();

  // reducer_shards.cpp.
  WorkPtr average_block(std::size_t bucket, CallOptions call);
  void share_flags();
  void spread_averages();
  void mark_averages();
  void refuse_old_average(std::size_t index) const;

  // reducer_buckets.cpp: the shape of the buckets.
  bool tolerates_unused() const { return options_.find_unused_parameters || options_.static_graph; }
  BucketPlan plan_of(std::vector<std::size_t> order) const;
  void build_buckets(BucketPlan plan);
  void describe_layout();
  void rebuild_if_planned();
  std::vector<std::size_t> agreed_order();
  void restart_pass(Stage stage);
  void check_last_pass();

  void refuse_rest_of_last_pass(const std::string& now) const;

  /// An exception ends the pass that runs, if one does. Other ranks may wait for what it has not
  /// sent: they are told.
  void break_pass(const std::string& what, Told told) noexcept;
  std::string hook_failure() const;
  template <typename Function>
  void guarded(Function&& function);
  class PassGuard;

  const NamedTensors parameters_;
  std::vector<ParameterSize> sizes_;
  const Group group_;
  /// Nothing is sent.
  const bool is_alone_;
  ReducerOptions options_;
  SparseGradients sparse_;
  std::vector<GradientSlot> slots_;
  std::shared_ptr<GradientBuckets> buckets_;
  std::optional<BucketPlan> planned_;
  PassTimeline timeline_;
  SlowRankWatch slow_ranks_;
  std::vector<std::int64_t> waited_ns_;
  std::int64_t exposed_before_ns_ = 0;
  std::optional<BucketHook> hook_;

  // Of a pass.
  ReducerPass pass_;
  std::mutex launch_mutex_;

  /// The last one was refused at its end, by all ranks.
  bool is_refused_ = false;

  // For all passes.
  bool is_manual_ = false;
  const bool checks_gradients_ = checks_gradients();
  double gradient_scale_ = 1.0;
  /// See reducer_shards.cpp: buckets are cut into blocks; each rank gets its own averages only.
  bool has_owners_ = false;
  bool scatters_averages_ = false;
  /// Until the first pass has ended, whose order of gradients decides the buckets.
  bool is_learning_ = true;
  /// Number of the pass that synchronises now or has done so last.
  std::uint64_t pass_number_ = 0;
  /// Of the last forward; see call_before_backward.
  std::shared_ptr<void> output_leaves_;

  // Per parameter.
  /// How often its gradient fires in a pass.
  std::vector<std::uint32_t> num_expected_;
  std::vector<GradientState> gradient_states_;

  AccumulateHooks hooks_;  // last: destroyed first, so no hook runs into a half-destroyed object
};

}  // namespace libddp
