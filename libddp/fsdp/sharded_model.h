#pragma once

// All units of a model: the order of their hooks, one barrier per step, prefetch, and the end of a
// backward pass.
//
// Words: a *step* begins with the outermost forward; a *pass* is one backward pass.
//
// NOTE [Barriers]
// Where the parameters exist once for all ranks, a rank may change its block only when nobody reads
// it any more, and others may read it only when it has been changed. What a script changes, and
// when, is not seen here. So there is a barrier wherever a rank could go on to change something
// that another still reads: at the end of a forward, with or without gradients, as nobody knows
// whether a backward pass will follow; and at the end of a pass, where averages have done it in the
// usual case: a rank has the average of a unit when all ranks' last gradient of that unit has come.
// A pass has a barrier of its own where it averages nothing (gradients of inputs only, no_sync), or
// has read frozen parameters after the last of its averages. The barrier at the beginning of a step
// makes changes visible. No barrier is per unit. There is one per group where units are sharded
// over different ones.
//
// NOTE [When a pass has left a unit]
// A pass does not need a unit any more when it has the gradients of all of its parameters. Where
// some are frozen, it may still need these, to reach what lies before them; then it has left the
// unit when it comes to one whose forward had ended before this one's began, as autograd runs
// nodes in the reverse order of their making. A recomputation that comes before the unit is reached
// may save frozen parameters as they are (torch's own checkpoint does), so the unit stays whole
// from there on. Of several forwards since the last pass, which the next may all go through, the
// first beginning and the last end count; those without gradients leave no nodes. What is called by
// itself behind the root's forward (a head, for a loss in chunks) may have passes of its own while
// the root's still waits: it keeps its place in that forward.
//
// NOTE [Gradients that come again]
// A module that runs twice with checkpoint(use_reentrant=True) gets the gradients of each run by
// themselves, within one pass, and the unit has sent those of the first on their way when the
// second come. They are averaged too, and added, as torch does it. All ranks have the same graph,
// so what is on its way is ended at the same place everywhere. Where hooks of users wait for the
// average, it is an error: they would run twice. What runs again may be a part of a unit's
// forward, of which no hook of the unit tells, so a pass has not left a unit when its last gradient
// has come in such a run: then it is as with frozen parameters, above.
//
// NOTE [Hidden shards]
// Scripts that use a weight in another module's forward (a loss that multiplies by the head's)
// would compute with this rank's rows, and where nothing minds the size, as in an evaluation, get
// numbers. So while a forward runs, the parameters of units whose own does not show vectors, as
// torch's do: matrix products fail, on all ranks. What is written into them then is told: other
// ranks may read the unit before, or behind that.
//
// NOTE [Late hooks]
// A hook that a user puts on a parameter for when its gradient has been accumulated runs when the
// average is in `.grad`, on the shard: inside the pass, once the unit's average has come. An
// optimizer that steps there changes a block of which all ranks have had the last gradient.
//
// NOTE [Outputs on the CPU]
// Autograd has a thread for each device and one for the CPU. Where a model on a device has outputs
// on both, a pass comes to the outermost unit in two threads, so hooks run one at a time, under a
// lock. When the one thread comes to where it needs the other is another matter on each rank, and
// the order of the collectives must not depend on it: the outermost unit's gradients, which may
// come in between, are averaged at the end of the pass; and an inner unit of several ranks may have
// no output on the CPU that a pass could begin at. What a script does behind the model is not seen:
// branches that end on the CPU and on the device, and meet in no unit, can still take turns; then
// the ranks' words at the end of the pass differ.
//
// NOTE [Gradients of gradients]
// Of a pass with create_graph=True, autograd's nodes keep the whole parameters for the next pass
// through them, which begins at gradients and so comes to those nodes before any output of a
// module. So the gradients that the pass hands out count as outputs, of all units that it has
// reached. These stay in memory until another pass or the next step. A recomputation may be the
// first that is seen of that pass.
//
// NOTE [Recomputations]
// A forward inside of a pass gives back the memory that it has gathered itself, as a recomputed
// part may hold many units. What was there before is needed by the pass: nodes of the unit run
// next, also where the pass computes the gradients of inputs only and takes none of the unit's.
//
// Where they are gathered, a unit's all-gather starts when the one before it begins to compute, in
// the order of the first step; at most two gathered units wait. Reductions run beside the backward,
// one at a time, so at most two units' whole gradients are there at a time. Small units are
// averaged together, the last of them at the end of the pass: see small_reductions.h. Collective
// order: the barrier of the step; all-gathers and reductions in the order in which the modules run;
// units that a pass did not reach are left out of it, on all ranks alike. Thread rule: one forward
// or backward at a time.
//
//   auto model = ShardedModel::create({root_unit, block_0, block_1}, {});
//   model->before_forward(*block_0);
//   auto y = block->forward(x);
//   model->after_forward(*block_0, {y});

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "libddp/fsdp/copy_options.h"
#include "libddp/fsdp/param_group.h"
#include "libddp/fsdp/parameter_faces.h"
#include "libddp/fsdp/sharded_model_options.h"

namespace libddp {

class PassFailure;
class DeviceCalls;
class SmallReductions;

class ShardedModel : public std::enable_shared_from_this<ShardedModel> {
 public:
  using ParamGroupPtr = std::shared_ptr<ParamGroup>;

  /// `units`: the root first, the same on every rank.
  static std::shared_ptr<ShardedModel> create(std::vector<ParamGroupPtr> units,
                                              ShardedModelOptions options);
  ~ShardedModel();

  /// `is_apart`: it is one of several calls of a part of the unit, behind its own forward; their
  /// gradients are added up, see ParamGroup::begin_pass.
  void before_forward(ParamGroup& unit, bool is_apart = false);
  void after_forward(ParamGroup& unit, const std::vector<at::Tensor>& outputs,
                     bool is_apart = false);
  /// Instead of after_forward, where the forward threw; `what` in words. The other ranks may wait
  /// for this one: where it was the outermost forward, they are told.
  void forward_failed(ParamGroup& unit, const std::string& what);
  /// The same where before_forward threw, or what the caller does ahead of it.
  void report_error(const std::string& what) const noexcept;
  /// After a backward pass that threw, of this model or not: the other ranks are told `what`, if a
  /// forward of this model still waits for its backward. A pass that had reached the model needs
  /// no call: its failure is seen. Returns whether they were told.
  bool backward_failed(const std::string& what) noexcept;
  /// Inside of a backward pass of which the unit's outputs are no part, as it begins at nodes
  /// within it: what is written of the unit's gradients belongs to the pass.
  void reach_from_within(ParamGroup& unit);
  bool is_root(const ParamGroup& unit) const { return units_.front().get() == &unit; }

  /// Whether backward passes average their gradients (the opposite of no_sync), of the units that
  /// do (ParamGroup::syncs).
  void set_sync(bool sync) { syncs_ = sync; }
  bool syncs() const { return syncs_; }

  /// Whether some `.grad` shows a whole gradient of this rank beside the rows that it owns, left by
  /// a pass without synchronisation: nothing that an optimizer may use.
  bool shows_larger_gradients() const;

  /// Averages what passes without synchronisation have left, if passes are to average; a
  /// collective. Without effect inside of a forward or backward pass.
  void average_waiting();

  /// The host may write this rank's shards afterwards, offloaded ones too. For who does so between
  /// a forward with gradients and its backward pass; otherwise nothing is under way then.
  void finish_copies();

  /// Makes the values that this rank owns visible to all. Collective. A forward does it by itself.
  void publish();
  /// Lets the parameters of a unit show whole tensors until its next forward ends, `reshard`, or
  /// copies; what is written into them is undefined. A collective; without effect inside of a
  /// forward or backward pass.
  void unshard(ParamGroup& unit);
  void reshard(ParamGroup& unit);
  /// Lets the parameters of some units show copies of the whole tensors; collective, outside of any
  /// forward.
  void show_copies(const std::vector<ParamGroupPtr>& units, const CopyOptions& options);
  void show_copies() { show_copies(units_, {}); }
  /// `keep`: changes of the copies go into the parameters; every rank takes what it owns.
  void end_copies(const std::vector<ParamGroupPtr>& units, bool keep);
  void end_copies(bool keep) { end_copies(units_, keep); }

  const std::vector<ParamGroupPtr>& units() const { return units_; }

 private:
  /// A backward pass, which may fail. Autograd has it.
  struct Pass {
    Pass(std::weak_ptr<ShardedModel> of, bool averages);
    ~Pass();
    bool averages(const ParamGroup& unit) const { return syncs && unit.syncs(); }
    /// Empty once the pass has ended as it should.
    std::weak_ptr<ShardedModel> model;
    const bool syncs;
    const std::unique_ptr<PassFailure> failure;
    /// See NOTE [Gradients of gradients].
    bool makes_graph = false;
    /// Whether it writes gradients; one that computes those of given inputs does not.
    bool accumulates = false;
    /// Whether others may read parameters after the last average that this rank has.
    bool must_meet = false;
    /// Whether a unit that it has reached had hooks of users by then.
    bool has_late_hooks = false;
    std::deque<ParamGroup*> reducing;
    /// Units that stay whole until the pass has left them.
    std::vector<ParamGroup*> lingering;
    /// Units that it has reached since it makes a graph.
    std::vector<ParamGroup*> in_graph;
  };

  ShardedModel(std::vector<ParamGroupPtr> units, ShardedModelOptions options);

  /// See NOTE [Outputs on the CPU].
  std::unique_lock<std::recursive_mutex> lock_hooks();
  /// Throws ArgumentError.
  void check_outputs(const ParamGroup& unit, const std::vector<at::Tensor>& outputs) const;
  /// Of the unit's parameters, and of the faces that stand for them.
  void unshard_values(ParamGroup& unit);
  void reshard_values(ParamGroup& unit, bool frees = true);
  void hide_shards(bool hides);
  /// The pass is done with it. One that runs inside of a forward is not the last to need it.
  void leave_unit(ParamGroup& unit) {
    if (unit.forward.running == 0) reshard_values(unit, /*frees=*/!pass_->makes_graph);
  }
  void tell_others(const std::string& what) const noexcept;
  void begin_step();
  void recover();
  /// Whether a forward of the unit is the root's, or a part of it.
  bool is_in_order(const ParamGroup& unit, bool is_apart) const;
  void before_backward(ParamGroup& unit, bool accumulates, bool is_apart);
  /// See NOTE [Gradients of gradients].
  void before_backward_of_gradients(const std::vector<ParamGroup*>& units, bool accumulates);
  void expect_backward_of_gradients();
  void begin_pass();
  void reach(ParamGroup& unit, bool accumulates, bool is_apart = false);
  bool lingers(ParamGroup& unit);
  void leave_units_after(const ParamGroup& unit);
  /// Autograd has written one, in a hook of the unit's.
  void take_gradient(ParamGroup& unit, std::size_t flat, std::size_t index);
  void begin_again(ParamGroup& unit);
  void end_pass();
  void reduce(ParamGroup& unit);
  /// True if there was something.
  bool reduce_rest();
  void collect_oldest(std::size_t most);
  void install_for_hooks();
  bool has_late_hooks(ParamGroup& unit) const;
  void run_late_hooks(ParamGroup& unit);
  void prefetch(const ParamGroup& unit, int step);
  void record(ParamGroup& unit);
  template <typename Function>
  void guarded(Function&& function);

  const std::vector<ParamGroupPtr> units_;
  const ShardedModelOptions options_;
  /// The ranks that share units on a device; null where there are none.
  const Group device_ranks_;
  const std::unique_ptr<DeviceCalls> calls_;
  bool syncs_ = true;
  /// An outermost forward has recorded gradients, and no backward pass has ended since.
  bool awaits_backward_ = false;
  /// The last pass of this step has made a graph.
  bool keeps_graph_ = false;
  /// Modules whose forward runs, one inside the other.
  int depth_ = 0;
  /// See NOTE [Hidden shards].
  bool hides_ = false;
  /// The one that runs, or has failed without having been cleared away.
  Pass* pass_ = nullptr;
  /// Counts beginnings and ends of forwards.
  std::uint64_t clock_ = 0;
  /// When the first forward with gradients since the last pass began.
  std::uint64_t graphs_begin_ = 0;
  /// Units in the order of the first step's forward.
  std::vector<ParamGroup*> order_;
  std::unique_ptr<SmallReductions> small_;
  /// See call_before_backward.
  std::vector<std::shared_ptr<void>> output_leaves_;
  /// Locked where a unit is on a device. Hooks of users, which run inside of it, may call the
  /// model.
  const bool runs_beside_devices_;
  /// The last outermost forward has outputs on the CPU, of a model on a device.
  bool runs_in_two_threads_ = false;
  std::recursive_mutex hooks_mutex_;
};

}  // namespace libddp
