#pragma once

// Sharded training of a torch::nn::Module: each rank owns, updates and averages its part of the
// parameters, which are whole while the module computes.
//
// Create it last, after fully_shard of the parts that are to be units of their own: its own unit
// has the rest. The module's parameters keep their identity and names, so an optimizer may be built
// before or after; between steps each shows the rows that this rank owns. All ranks must begin with
// equal values: seed them alike, or load a state.
// What computes with whole tensors or with norms gets this rank's rows, and nobody can tell it so:
// net->forward(x) by itself, net->clone(), torch::save(net) (see with_full_params),
// torch::optim::LBFGS, which goes other ways than without sharding, and
// torch::nn::utils::clip_grad_norm_, in place of which there is clip_grad_norm. That holds after
// this object has ended, too.
// Thread rule: one forward or backward at a time; not to be destroyed during a backward pass.
// Construction, forward, backward, clip_grad_norm and everything about state are collectives.
//
//   libddp::fully_shard_each(net->blocks, {.shard = group});
//   libddp::FullyShardedDataParallel model(net, {.shard = group});
//   torch::optim::AdamW optimizer(net->parameters(), 3e-4);
//   model.forward(x).sum().backward();
//   model.clip_grad_norm(1.0);
//   optimizer.step();

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/clip_grad_norm.h"
#include "libddp/fsdp/full_state.h"
#include "libddp/fsdp/fully_shard.h"
#include "libddp/fsdp/no_sync.h"
#include "libddp/fsdp/wrapped_module.h"
#include "libddp/group/required_group.h"

namespace libddp {

template <typename Module>
class FullyShardedDataParallel {
 public:
  /// Throws what fully_shard throws.
  explicit FullyShardedDataParallel(std::shared_ptr<Module> module, const ShardOptions& options,
                                    ShardedModelOptions model_options = {})
      : module_(required(std::move(module), "FullyShardedDataParallel")),
        model_options_(std::move(model_options)) {
    fully_shard(module_, options);
    model_ = WrappedModule::join(*module_, model_options_);
  }
  /// For a module holder, such as torch::nn::Sequential.
  explicit FullyShardedDataParallel(const torch::nn::ModuleHolder<Module>& holder,
                                    const ShardOptions& options,
                                    ShardedModelOptions model_options = {})
      : FullyShardedDataParallel(holder.ptr(), options, std::move(model_options)) {}
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;
  ~FullyShardedDataParallel() { WrappedModule::forget(*module_); }

  /// Goes on in another group of any size, as after libddp::rejoin: same module and parameters. A
  /// collective of `group`, the one that wrapping is, so ranks that are new there call fully_shard
  /// and make their FullyShardedDataParallel instead. Each rank owns other rows then, and those of
  /// before are gone with the old group: parameters are NaN until a snapshot or a state is loaded,
  /// an optimizer's moments are to be dropped or loaded too. Gradients are dropped, and what was
  /// set on units. Not during a pass, nor while a NoSync guard lives. Where it throws, it can be
  /// repeated, and until then the model refuses everything else.
  /// Throws ArgumentError for units that shard and replicate, and what fully_shard throws.
  void rejoin(const Group& group) {
    required_group(group, "FullyShardedDataParallel::rejoin");
    rejoin_units([&](ShardOptions options) {
      if (options.shard && options.replicate) {
        throw ArgumentError(
            "libddp fsdp: rejoin(group): a unit shards over one group and replicates over another. "
            "Hint: rejoin(shard, replicate).");
      }
      if (options.replicate) options.replicate = group;
      if (options.shard) options.shard = group;
      return options;
    });
  }
  /// The same with units that shard and replicate.
  void rejoin(const Group& shard, const Group& replicate) {
    required_group(shard, "FullyShardedDataParallel::rejoin");
    required_group(replicate, "FullyShardedDataParallel::rejoin");
    rejoin_units([&](ShardOptions options) {
      options.shard = shard;
      options.replicate = replicate;
      return options;
    });
  }

  /// The module's own forward. The backward pass of its result averages gradients, unless gradients
  /// are off or a NoSync guard lives.
  /// Throws ArgumentError where it has written into a parameter of a unit, on the CPU with several
  /// ranks (torch::nn::Embedding with max_norm does).
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    return sharded_forward(*module_, std::forward<Arguments>(arguments)...);
  }

  /// See no_sync.h.
  [[nodiscard]] NoSync no_sync() { return NoSync(model()); }

  /// See clip_grad_norm.h.
  at::Tensor clip_grad_norm(double max_norm, double norm_type = 2.0) {
    return libddp::clip_grad_norm(module_->parameters(), max_norm, norm_type,
                                  WrappedModule::group_of(*module_));
  }

  /// Whole tensors on every rank, by their names in the module.
  FullState full_state() { return libddp::full_state(model(), *module_); }
  void load_full_state(const FullState& state) {
    libddp::load_full_state(model(), *module_, state);
  }
  /// Runs `function` with whole parameters, for what wants the module as it was:
  ///   model.with_full_params([&] { torch::load(net, "net.pt"); }, /*writeback=*/true);
  void with_full_params(const std::function<void()>& function, bool writeback = false) {
    libddp::with_full_params(model(), function, writeback);
  }

  /// The module's own; constant, since its `forward` by itself computes with this rank's rows.
  const Module& operator*() const { return *module_; }
  const Module* operator->() const { return module_.get(); }
  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  /// For what is not here. Call no `forward` of it.
  const std::shared_ptr<Module>& module() const { return module_; }
  /// Throws StateError where the last rejoin has failed.
  ShardedModel& model() {
    if (model_) return *model_;
    throw StateError(
        "libddp fsdp: the model has left its process group and could not join another one: its "
        "last rejoin() failed. Hint: call it again, on all ranks.");
  }

 private:
  template <typename Regroup>
  void rejoin_units(const Regroup& regroup) {
    model_ = nullptr;
    WrappedModule::rejoin(*module_, regroup);
    model_ = WrappedModule::join(*module_, model_options_);
  }

  std::shared_ptr<Module> module_;
  ShardedModelOptions model_options_;
  std::shared_ptr<ShardedModel> model_;
};

}  // namespace libddp
