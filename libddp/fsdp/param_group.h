#pragma once

// The parameters of one wrapped module (a *unit*), and what happens to them around its forward and
// backward.
//
// A unit is sharded, unsharded for its module's forward, sharded again, unsharded for its backward,
// and sharded once the backward has left it. Its last gradient starts the averaging. ShardedModel
// calls it and knows the order of all units. It owns the hooks on the parameters: what autograd
// brings goes from the hook to the model, which hands it down to the unit. Parameters that are
// trained and those that are frozen at construction stand in arrays of their own, so that usual
// cases have no gradients of frozen ones; which ones are trained may change between passes. Thread
// rule: one forward or backward at a time. Construction, unshard and reduce are collectives.
//
//   auto unit = std::make_shared<ParamGroup>("h.0", parameters, options);
//   auto model = ShardedModel::create({root, unit}, group);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/fsdp/owned_tensors.h"
#include "libddp/fsdp/reduce_hook.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class AccumulateHooks;
class FlatParameter;
class LateHooks;

class ParamGroup {
 public:
  /// `parameters`: of this unit alone, named as in its module; may be empty. Collective.
  /// Throws ArgumentError where a parameter is not a leaf on the first one's device, or wrapped
  /// already.
  ParamGroup(std::string name, const NamedTensors& parameters, ShardOptions options);
  ~ParamGroup();
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& name() const { return name_; }
  const ShardOptions& options() const { return options_; }
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const { return flats_; }

  /// Lets go of the parameters, see FlatParameter::leave. No model may have it any more.
  void leave();

  /// Its place among the units of the model, see FlatParameter.
  void set_place(std::size_t place);

  /// Gets each gradient that autograd has written, and passes it on to `accumulate`, which is what
  /// happens to it without a handler.
  using GradientHandler =
      std::function<void(ParamGroup& unit, std::size_t flat, std::size_t index)>;
  void on_gradient(GradientHandler handler) { handler_ = std::move(handler); }

  /// Called with what the handler throws, which autograd would give another class; may throw what
  /// it makes of it.
  void on_error(std::function<void(std::exception_ptr)> callback) {
    on_error_ = std::move(callback);
  }

  /// See FlatParameter.
  void take_written();
  void publish();
  bool needs_barrier() const;
  void begin_unshard();
  /// True if the parameters have begun to show whole tensors, or have ended to.
  bool unshard();
  /// `frees`: gathered bytes are given back too.
  bool reshard(bool frees);
  bool is_unsharded() const;
  /// Parameters that show shards hide them, or show them again; others stay what they are.
  void hide_shards(bool hides);
  /// See FlatParameter.
  void check_rows_unwritten();
  /// Whether the bytes of the whole array are there, or on their way.
  bool is_in_memory() const;
  /// The host may use shards and gradients afterwards: see NOTE [Offloading].
  void finish_copies();
  /// After unshard, by the wish of a script, which lasts until reshard.
  void hold() { values_ = Values::Held; }
  bool is_held() const { return values_ == Values::Held; }

  /// Gradients become their sum over all ranks divided by this; nullopt = by the number of ranks.
  void divide_gradients_by(std::optional<double> divisor);

  /// Parameters of a used unit that got no gradient on any rank: zeros; what they had, as under
  /// torch's fully_shard; nullopt: zeros where others of the unit got one, as under torch's FSDP1
  /// (the default). On some ranks only: zeros count there.
  void zero_unused(std::optional<bool> zeroes);

  /// Whether `.grad` shows what passes without synchronisation have left (the default).
  void show_waiting(bool shows);

  /// `hook` in place of the group's collective, which it must agree on with the other ranks' hooks;
  /// null = the group's. REQUIRES: not both groups.
  void reduce_by(const ReduceHook& hook);
  bool has_reduce_hook() const;

  /// Whether passes that average do so with this unit's gradients; else they wait for one that
  /// does.
  void set_sync(bool sync) { syncs_ = sync; }
  bool syncs() const { return syncs_; }

  /// The part of a pass that concerns this unit. `adds_up`: several gradients of a parameter come
  /// together, and are added in the precision of the average; else in that of the computation.
  void begin_pass(bool averages, bool adds_up = false);
  bool is_in_pass() const { return state_ != TrainingState::Idle; }
  /// Moves a gradient that autograd has written into its array. Throws StateError outside of a
  /// pass, and where it came too late or cannot be averaged.
  void accumulate(std::size_t flat, std::size_t index);
  /// All gradients of this pass have come.
  bool is_complete() const { return state_ == TrainingState::Complete; }
  /// Whether the pass brings gradients of all parameters: then it needs none of them when these
  /// have come. A frozen one may be needed for longer.
  bool trains_all() const;
  /// As it is now, also outside of a pass.
  bool has_frozen() const;
  /// There are gradients, or zeros in place of them, to be averaged.
  bool wants_average() const;
  bool has_waiting() const;
  void reduce();
  /// Instead of reduce, for who averages several units at once.
  void begin_reduction();
  bool is_reducing() const { return state_ >= TrainingState::Reducing; }
  /// The averages are on their way, and none of them is in `.grad`.
  bool awaits_averages() const { return state_ == TrainingState::Reducing; }
  /// Whether all averages are there, and not yet in `.grad`.
  bool is_averaged() const;
  void collect();
  /// REQUIRES: is_averaged.
  void begin_again();
  void install();
  void end_pass();
  void abandon();

  /// Whether users have put hooks on one of the parameters that run when `.grad` is written.
  bool has_late_hooks() const;
  /// Runs those of the parameters that the last `install` gave an average.
  void run_late_hooks();

  /// When forwards of the module with gradients began and ended, in numbers that the model counts,
  /// see NOTE [When a pass has left a unit]; how many of its calls run, one inside the other; and
  /// whether the backward pass that it runs in, as a recomputation, needs the memory behind it.
  struct Span {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    int running = 0;
    bool is_kept = false;
  };
  Span forward;

 private:
  /// Where a backward pass is with this unit, in this order.
  enum class TrainingState : std::uint8_t {
    Idle,
    Gradients,  // some are still to come
    Complete,   // all have come
    Reducing,
    Installed,  // averages are in `.grad`, the pass goes on
  };
  /// What the parameters show.
  enum class Values : std::uint8_t { Shards, Whole, Held };
  /// Those of one array; null where the dtype has no gradients.
  struct Hooks;

  Hooks make_hooks(const FlatParameter& parameter, std::size_t flat);
  void handle_gradient(std::size_t flat, std::size_t index);
  void put_hooks_back();

  const std::string name_;
  const ShardOptions options_;
  OwnedTensors owned_;
  GradientHandler handler_;
  std::function<void(std::exception_ptr)> on_error_;
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  bool syncs_ = true;
  TrainingState state_ = TrainingState::Idle;
  Values values_ = Values::Shards;
  /// Of flats_. Last: destroyed first, so no hook runs into a half-destroyed object.
  std::vector<Hooks> hooks_;
};

}  // namespace libddp
