#pragma once

// AdamW for LibTorch programs: torch::optim::AdamW by name, options, groups, state and archives,
// with the fused update of fused_adamw.h. Results are those of libddp.optim.AdamW, and so of
// torch.optim.AdamW(fused=True), bit for bit; torch::optim::AdamW rounds differently.
//
// Over parameters of FullyShardedDataParallel each rank updates its rows. With `shard_over`, the
// ranks of a DistributedDataParallel model share the work and the state (ZeRO-1): step() is a
// collective then, archives hold whole tensors, and torch::save is a collective between hosts and
// on devices. With `shard_gradients` the averages are shared out too, which halves what a backward
// pass sends between hosts; `.grad` then holds averages in the elements that the rank owns, its own
// gradients elsewhere. Thread rule: one thread at a time; not while a backward pass runs.
//
//   libddp::DistributedDataParallel model(net, group);
//   libddp::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-4),
//                           {.shard_over = &model.replica()});
//   model.forward(x).sum().backward();
//   optimizer.clip_grad_norm(1.0);
//   optimizer.step();

#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

namespace libddp {

class AdamwShards;
class ReplicatedModel;

/// What torch::optim::AdamWOptions lacks.
struct AdamWExtras {
  /// Follow the gradient instead of going against it.
  bool maximize = false;
  /// Of the model whose trained parameters are the optimizer's: DistributedDataParallel::replica().
  ReplicatedModel* shard_over = nullptr;
  /// Each rank gets the averages of what it owns only. REQUIRES: shard_over.
  bool shard_gradients = false;
};

class AdamW : public torch::optim::AdamW {
 public:
  /// A parameter that a group lists twice, as net->parameters() does with tied weights, is updated
  /// once. Throws what AdamwShards throws, and ArgumentError for shard_gradients without shard_over
  /// and for a parameter in two groups.
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 const torch::optim::AdamWOptions& defaults = {}, AdamWExtras extras = {});
  explicit AdamW(std::vector<at::Tensor> parameters,
                 const torch::optim::AdamWOptions& defaults = {}, AdamWExtras extras = {});
  ~AdamW() override;

  /// Updates every parameter that has a gradient; returns what `closure` has returned.
  /// Throws ArgumentError for a parameter that is no dense floating-point tensor with memory, and
  /// with `shard_over` StateError where the last pass has not averaged.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// With `shard_gradients`, in the place of torch::nn::utils::clip_grad_norm_, which would see
  /// this rank's averages only; without them it does the same. Returns the norm of the whole model
  /// before. Throws StateError without `shard_over`.
  at::Tensor clip_grad_norm(double max_norm, double norm_type = 2.0);

  /// With `shard_over`, after `replica.rejoin`: shares the work over the new group. A collective as
  /// the construction is, so other ranks may make their optimizer instead. The state goes, as parts
  /// of it were other ranks'; load it afterwards. Without `shard_over` nothing happens.
  void rejoin(ReplicatedModel& replica);

  /// With `shard_over` both throw StateError between the model's rejoin and this one's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // For who keeps the state elsewhere than in an archive.
  bool maximizes() const { return maximize_; }
  /// With `shard_over`, a copy whose state() has whole tensors, a collective as save(); null where
  /// the optimizer's own has them.
  std::unique_ptr<torch::optim::AdamW> with_whole_state() const;
  /// Whole tensors were put into state(): with `shard_over`, this rank keeps its part of them.
  void cut_state();
  /// Zeros in state() for those that have none there, as their first step makes them: what is
  /// adjacent in the parameters is adjacent in the moments. With `shard_over` nothing.
  void make_states(const std::vector<at::Tensor>& parameters, bool amsgrad);

 private:
  struct ParamState;

  bool begin();
  bool make_ready();
  void update(torch::optim::OptimizerParamGroup& group);
  std::vector<ParamState*> states_of(const std::vector<at::Tensor>& parameters, bool amsgrad);
  void add_states(const std::vector<at::Tensor>& parameters, bool amsgrad);
  std::vector<at::Tensor> all_parameters() const;

  const bool maximize_;
  std::unique_ptr<AdamwShards> shards_;
  std::size_t num_checked_ = 0;
};

}  // namespace libddp
