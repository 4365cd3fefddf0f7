#pragma once

// What a rank has of an AdamW whose work is shared over the ranks of a DistributedDataParallel
// model (ZeRO-1): the moments of the elements that it owns, and their update. What the C++ and the
// Python optimizer have in common; see libddp/ddp/sharded_parameters.h.
//
// What a rank owns is known from the end of the first pass that synchronises on.
// Thread rule: one thread at a time. Collectives: make_ready the first time, begin_update, publish,
// clip_grad_norm, and whole_moments between hosts and on devices.
//
//   AdamwShards shards(model.replica(), net->parameters());
//   loss.backward();
//   if (!shards.make_ready(amsgrad)) return;
//   shards.begin_update();
//   shards.update(parameters, steps, {.lr = 3e-4});
//   shards.publish();

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "libddp/ddp/sharded_parameters.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"
#include "libddp/optim/fused_adamw.h"

namespace libddp {

class Reducer;
class ReplicatedModel;

/// Throws ArgumentError naming the first parameter that is no floating-point tensor with memory, or
/// whose gradient is sparse.
void check_adamw_parameters(const std::vector<at::Tensor>& parameters);

class AdamwShards {
 public:
  /// `parameters`: the optimizer's. With `shard_gradients`, from the next pass on each rank gets
  /// the averages of what it owns only. Throws what `check` and ReplicatedModel::shard throw.
  AdamwShards(ReplicatedModel& replica, const std::vector<at::Tensor>& parameters,
              bool shard_gradients);

  /// The model's trained parameters.
  const NamedTensors& parameters() const { return parameters_; }
  const Group& group() const { return group_; }
  /// Place of a parameter there. Throws ArgumentError for others.
  std::size_t index_of(const at::Tensor& parameter) const;
  /// Throws ArgumentError unless `parameters` without the frozen ones are exactly the model's.
  void check(const std::vector<at::Tensor>& parameters) const;

  /// Throws StateError where the model has gone on in another group (ReplicatedModel::rejoin): what
  /// is here belongs to the one before. Everything below does, too.
  void check_member() const;

  // A step.

  /// Throws StateError where a gradient has not been averaged, or the model is gone.
  void check_averaged() const;
  /// Whether it is known what this rank owns. The first time, moves the parameters and makes the
  /// moments, three of them with `amsgrad`, else two.
  bool make_ready(bool amsgrad);
  bool is_ready() const { return sharded_ != nullptr; }
  bool shards_gradients() const { return has_own_averages_only_; }
  /// From here on REQUIRES: is_ready(). See NOTE [Two barriers per update].
  void begin_update() { sharded_->begin_update(); }
  void publish() { sharded_->publish(); }
  /// What this rank owns of `parameters`, which have gradients. Otherwise as fused_adamw.
  std::size_t update(const std::vector<at::Tensor>& parameters,
                     const std::vector<at::Tensor>& steps, const AdamwOptions& options,
                     const at::Tensor& grad_scale = {}, const at::Tensor& found_inf = {});

  /// What this rank owns of `.grad`, for norms.
  at::Tensor own_gradient(std::size_t index) const;
  /// Scales all gradients to a norm over the whole model; returns the norm before.
  at::Tensor clip_grad_norm(double max_norm, double norm_type);

  // The state: `num_moments` moments of each parameter, in torch's order. What a rank owns of one
  // is a view, so a state that has it is up to date.

  /// exp_avg, exp_avg_sq, max_exp_avg_sq.
  static const std::vector<std::string>& moment_names();
  std::size_t num_moments() const { return moments_.size(); }
  /// What this rank owns, set to zeros.
  std::vector<at::Tensor> new_moments(const at::Tensor& parameter);
  /// Takes this rank's part of whole tensors and returns it. Throws ArgumentError where one is
  /// undefined or has another shape than the parameter.
  std::vector<at::Tensor> load_moments(const at::Tensor& parameter,
                                       const std::vector<at::Tensor>& whole);
  /// Copies in the parameter's shape; a collective between hosts and on devices.
  std::vector<at::Tensor> whole_moments(const at::Tensor& parameter) const;

 private:
  std::vector<at::Tensor> moments(const at::Tensor& parameter) const;
  void check_moment(std::size_t moment, std::size_t index, const at::Tensor& whole) const;
  std::vector<std::size_t> in_memory_order(const std::vector<std::size_t>& indices) const;

  const std::weak_ptr<Reducer> reducer_;
  const std::shared_ptr<const bool> is_member_;
  const bool has_own_averages_only_;
  const NamedTensors parameters_;
  const Group group_;
  /// TensorImpl -> place.
  std::unordered_map<const void*, std::size_t> indices_;
  /// Null until is_ready().
  std::unique_ptr<ShardedParameters> sharded_;
  /// Where a parameter comes in memory.
  std::vector<std::size_t> positions_;
  std::vector<std::shared_ptr<ShardedNumbers>> moments_;
};

}  // namespace libddp
