#pragma once

// The parameters of one wrapped module (a *unit*), and what happens to them around its forward and
// backward.
//
// A unit is sharded, unsharded for its module's forward, sharded again, unsharded for its backward,
// and sharded once the backward has left it. Its last gradient starts the averaging. ShardedModel
// calls it and knows the order of all units. Parameters that are trained and those that are frozen
// at construction stand in arrays of their own, so that usual cases have no gradients of frozen
// ones; which ones are trained may change between passes.
// Thread rule: one forward or backward at a time. Construction, unshard and reduce are collectives.
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

#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/owned_tensors.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class ParamGroup {
 public:
  /// `parameters`: of this unit alone, named as in its module; may be empty. Collective.
  /// Throws ArgumentError where a parameter is not a leaf on the CPU, or wrapped already.
  ParamGroup(std::string name, const NamedTensors& parameters, ShardOptions options);
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& name() const { return name_; }
  const ShardOptions& options() const { return options_; }
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const { return flats_; }

  /// Its place among the units of the model, see FlatParameter.
  void set_place(std::size_t place);

  /// Called with the unit when autograd has written one of its gradients.
  void on_gradient(std::function<void(ParamGroup&)> callback) {
    on_gradient_ = std::move(callback);
  }

  /// Called when autograd writes a gradient after the others have been sent on their way; ends what
  /// is on its way and calls begin_again.
  void on_gradient_again(std::function<void(ParamGroup&)> callback) {
    on_again_ = std::move(callback);
  }

  /// Called when its parameters have begun to show whole tensors, and when they end to.
  void on_show(std::function<void(ParamGroup&, bool whole)> callback) {
    on_show_ = std::move(callback);
  }

  /// Called with an exception of a gradient's hook, which autograd would give another class; may
  /// throw what it makes of it.
  void on_error(std::function<void(std::exception_ptr)> callback) {
    on_error_ = std::move(callback);
  }

  /// See FlatParameter.
  void take_written();
  void publish();
  bool needs_barrier() const;
  void begin_unshard();
  void unshard();
  /// `frees`: gathered bytes are given back too.
  void reshard(bool frees);
  bool is_unsharded() const;
  /// unshard by the wish of a script, which lasts until reshard.
  void hold();
  bool is_held() const { return is_held_; }

  /// Gradients become their sum over all ranks divided by this; nullopt = by the number of ranks.
  void divide_gradients_by(std::optional<double> divisor);

  /// Parameters of a used unit that got no gradient on any rank: zeros, as torch's FSDP1 has it
  /// (the default), or what they had, as its fully_shard. On some ranks only: zeros count there.
  void zero_unused(bool zeroes);

  /// Whether `.grad` shows what passes without synchronisation have left (the default).
  void show_waiting(bool shows);

  /// `hook` in place of the group's collective, which it must agree on with the other ranks' hooks;
  /// null = the group's. REQUIRES: not both groups.
  void reduce_by(FlatParameter::ReduceHook hook);
  bool has_reduce_hook() const { return has_reduce_hook_; }

  /// The part of a pass that concerns this unit.
  void begin_pass(bool averages);
  bool is_in_pass() const { return phase_ != Phase::Idle; }
  /// All gradients of this pass have come.
  bool is_complete() const { return phase_ == Phase::Complete; }
  /// Whether the pass brings gradients of all parameters: then it needs none of them when these
  /// have come. A frozen one may be needed for longer.
  bool trains_all() const;
  /// There are gradients, or zeros in place of them, to be averaged.
  bool wants_average() const;
  bool has_waiting() const;
  void reduce();
  /// Instead of reduce, for who averages several units at once.
  void begin_reduction();
  bool is_reducing() const { return phase_ == Phase::Reducing || phase_ == Phase::Installed; }
  /// Whether all averages are there, and not yet in `.grad`.
  bool is_averaged() const;
  void collect();
  /// REQUIRES: is_averaged.
  void begin_again();
  void install();
  void end_pass();
  void abandon();

  /// See FlatParameter.
  bool has_late_hooks() const;
  void run_late_hooks();

  /// When the module's last forward began and ended, in numbers that the model counts; and how many
  /// of its calls run, one inside the other.
  struct Span {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    int running = 0;
  };
  Span forward;

 private:
  /// In a backward pass.
  enum class Phase : std::uint8_t {
    Idle,
    Gradients,  // some are still to come
    Complete,   // all have come
    Reducing,
    Installed,  // averages are in `.grad`, the pass goes on
  };

  void tell_who_shows(bool whole);
  void accumulate_gradient(std::size_t flat, std::size_t index);
  void accumulate_guarded(std::size_t flat, std::size_t index);

  const std::string name_;
  const ShardOptions options_;
  OwnedTensors owned_;
  std::function<void(ParamGroup&)> on_gradient_;
  std::function<void(ParamGroup&)> on_again_;
  std::function<void(ParamGroup&, bool)> on_show_;
  std::function<void(std::exception_ptr)> on_error_;
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  Phase phase_ = Phase::Idle;
  bool is_held_ = false;
  bool has_reduce_hook_ = false;
  bool is_whole_ = false;
};

}  // namespace libddp
