#pragma once

// Sharded training of a torch::nn::Module: each rank owns, updates and averages its part of the
// parameters, which are whole while the module computes.
//
// Create it last, after fully_shard of the parts that are to be units of their own: its own unit
// has the rest. The module's parameters keep their identity and names, so an optimizer may be built
// before or after; between steps each shows the rows that this rank owns. All ranks must begin with
// equal values: seed them alike, or load a state.
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

#include "libddp/fsdp/clip_grad_norm.h"
#include "libddp/fsdp/full_state.h"
#include "libddp/fsdp/fully_shard.h"
#include "libddp/fsdp/no_sync.h"
#include "libddp/fsdp/wrapped_module.h"

namespace libddp {

template <typename Module>
class FullyShardedDataParallel {
 public:
  /// Throws what fully_shard throws.
  explicit FullyShardedDataParallel(std::shared_ptr<Module> module, const ShardOptions& options,
                                    ShardedModelOptions model_options = {})
      : module_(std::move(module)) {
    fully_shard(module_, options);
    model_ = WrappedModule::join(*module_, std::move(model_options));
  }
  /// For a module holder, such as torch::nn::Sequential.
  explicit FullyShardedDataParallel(const torch::nn::ModuleHolder<Module>& holder,
                                    const ShardOptions& options,
                                    ShardedModelOptions model_options = {})
      : FullyShardedDataParallel(holder.ptr(), options, std::move(model_options)) {}
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;
  ~FullyShardedDataParallel() { WrappedModule::forget(*module_); }

  /// The module's own forward. The backward pass of its result averages gradients, unless gradients
  /// are off or a NoSync guard lives.
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    return sharded_forward(*module_, std::forward<Arguments>(arguments)...);
  }

  /// See no_sync.h.
  [[nodiscard]] NoSync no_sync() { return NoSync(*model_); }

  /// See clip_grad_norm.h.
  at::Tensor clip_grad_norm(double max_norm, double norm_type = 2.0) {
    return libddp::clip_grad_norm(module_->parameters(), max_norm, norm_type);
  }

  /// Whole tensors on every rank, by their names in the module.
  FullState full_state() { return libddp::full_state(*model_, *module_); }
  void load_full_state(const FullState& state) {
    libddp::load_full_state(*model_, *module_, state);
  }
  /// Runs `function` with whole parameters, for what wants the module as it was:
  ///   model.with_full_params([&] { torch::load(net, "net.pt"); }, /*writeback=*/true);
  void with_full_params(const std::function<void()>& function, bool writeback = false) {
    libddp::with_full_params(*model_, function, writeback);
  }

  Module& operator*() const { return *module_; }
  Module* operator->() const { return module_.get(); }
  const std::shared_ptr<Module>& module() const { return module_; }
  ShardedModel& model() { return *model_; }

 private:
  std::shared_ptr<Module> module_;
  std::shared_ptr<ShardedModel> model_;
};

}  // namespace libddp
