#pragma once

// Data-parallel training of a torch::nn::Module: every rank holds the whole model, and gradients
// are averaged over the ranks while backward() runs.
//
// All ranks start from rank 0's parameters and buffers. The module's parameters keep their
// identity, so an optimizer may be built before or after. Embeddings with sparse(true) are found;
// other parameters with sparse gradients are named in options.sparse_parameters.
// Thread rule: one forward or backward at a time; not to be destroyed during a backward pass.
//
//   libddp::Group group = libddp::init_process_group();
//   auto net = std::make_shared<Net>();
//   libddp::DistributedDataParallel model(net, group, {.cap_bytes = 25u << 20});
//   torch::optim::AdamW optimizer(net->parameters(), 3e-4);
//   optimizer.zero_grad();
//   model.forward(x).sum().backward();
//   optimizer.step();

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "libddp/autograd/output_tensors.h"
#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/ddp/replicated_model.h"
#include "libddp/ddp/sparse_modules.h"
#include "libddp/ddp/uneven_inputs.h"
#include "libddp/group/process_group.h"
#include "libddp/module/module_tensors.h"

namespace libddp {

/// `options` with the names of the parameters to which torch's own modules give sparse gradients.
inline DistributedDataParallelOptions with_sparse_parameters(DistributedDataParallelOptions options,
                                                             const torch::nn::Module& module,
                                                             const NamedTensors& parameters) {
  for (std::string& name : sparse_parameters(module, parameters)) {
    options.sparse_parameters.push_back(std::move(name));
  }
  return options;
}

inline NamedTensors without(NamedTensors all, const NamedTensors& some) {
  for (const NamedTensor& one : some) {
    std::erase_if(all, [&](const NamedTensor& t) { return t.tensor.is_same(one.tensor); });
  }
  return all;
}

template <typename Module>
class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  /// Collective: every rank wraps the same model. Throws ArgumentError (see ReplicatedModel), also
  /// where the module or the group is null.
  /// `delayed.parameters` with their names in `module`.
  DistributedDataParallel(std::shared_ptr<Module> module, Group group, Options options = {},
                          DelayedParameters delayed = {})
      : module_(required(std::move(module), "DistributedDataParallel")),
        options_(with_sparse_parameters(std::move(options), *module_,
                                        without(named_parameters(*module_), delayed.parameters))),
        model_(without(named_parameters(*module_), delayed.parameters), named_buffers(*module_),
               std::move(group), options_, nullptr, delayed) {}
  /// For a module holder, such as torch::nn::Sequential.
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& holder, Group group,
                          Options options = {}, DelayedParameters delayed = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options, std::move(delayed)) {}

  /// Goes on in another group, as after libddp::rejoin: same module, parameters and optimizers. A
  /// collective of `group`, the one that the constructor is, so ranks that are new there make their
  /// DistributedDataParallel instead. All start from rank 0's values; load a snapshot afterwards.
  /// Gradients are dropped. See ReplicatedModel::rejoin; of AdamW with shard_over, AdamW::rejoin.
  void rejoin(Group group) {
    model_.rejoin(std::move(group), named_buffers(*module_), options_);
    synchronises_ = true;
    buffers_are_due_ = true;
  }

  /// The module's own forward. The backward pass of its result averages gradients, unless gradients
  /// are off or a NoSync guard lives.
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    const bool sends_buffers = buffers_are_due_ && options_.broadcast_buffers;
    const bool averages = synchronises_ && c10::GradMode::is_enabled();
    const int root = join_ ? join_->begin_forward(averages, sends_buffers) : 0;
    if (sends_buffers) model_.broadcast(module_->buffers(), root);
    model_.before_forward();
    auto output = guarded([&]() -> decltype(auto) {
      return module_->forward(
          in_dtype(std::forward<Arguments>(arguments), options_.mixed_precision.param_dtype)...);
    });
    buffers_are_due_ = model_.after_forward(output_tensors(output), synchronises_);
    return output;
  }

  /// Runs `train`, in which ranks may have different numbers of batches: a rank whose loop has
  /// ended takes part in the others' collectives until all are done, and then has the model of one
  /// that trained to the end.
  ///   model.join([&] {
  ///     for (const Batch& batch : mine) {
  ///       optimizer.zero_grad();
  ///       loss_of(model.forward(batch.x), batch.y).backward();
  ///       optimizer.step();
  ///     }
  ///   });
  /// A collective; what else in `train` is one must be as often on every rank. Where it throws, the
  /// ranks are out of step, so this one has to leave the group. Throws StateError inside of another
  /// join, where an optimizer shares its work over the ranks, and see JoinOptions.
  template <typename Train>
  void join(const Train& train, JoinOptions join_options = {}) {
    if (join_) {
      throw StateError(
          "libddp: join: the model runs in a join already. Hint: put both loops into one.");
    }
    join_.emplace(model_, join_options);
    try {
      train();
      std::vector<at::Tensor> all = module_->parameters();
      const std::vector<at::Tensor> buffers = module_->buffers();
      all.insert(all.end(), buffers.begin(), buffers.end());
      join_->finish(all, buffers);
    } catch (...) {
      join_.reset();
      throw;
    }
    join_.reset();
    buffers_are_due_ = true;
  }

  /// If `manual`, each synchronising backward is followed by one call of finalize_backward().
  void set_manual_finish(bool manual) { model_.set_manual_finalization(manual); }
  void finalize_backward() { model_.finalize_backward_manual(); }

  /// While it lives, passes accumulate gradients locally:
  ///   { auto guard = model.no_sync(); model.forward(a).sum().backward(); }
  ///   model.forward(b).sum().backward();   // averages the sum of both
  /// or
  ///   std::optional<decltype(model)::NoSync> guard;
  ///   if (!is_last) guard.emplace(model.no_sync());
  class NoSync {
   public:
    explicit NoSync(bool& synchronises)
        : synchronises_(&synchronises), before_(std::exchange(synchronises, false)) {}
    NoSync(NoSync&& other) noexcept
        : synchronises_(std::exchange(other.synchronises_, nullptr)), before_(other.before_) {}
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync() {
      if (synchronises_ != nullptr) *synchronises_ = before_;
    }

   private:
    /// Null in one that was moved from.
    bool* synchronises_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(synchronises_); }

  Module& operator*() const { return *module_; }
  Module* operator->() const { return module_.get(); }
  const std::shared_ptr<Module>& module() const { return module_; }
  ReplicatedModel& replica() { return model_; }

 private:
  /// What it throws reaches the other ranks, which wait for this one in backward.
  template <typename Forward>
  decltype(auto) guarded(const Forward& forward) {
    try {
      return forward();
    } catch (...) {
      model_.forward_failed(first_line_of(std::current_exception()), synchronises_);
      throw;
    }
  }

  std::shared_ptr<Module> module_;
  Options options_;
  bool synchronises_ = true;
  /// torch's rule: before the first forward, and before each that follows a synchronising one.
  bool buffers_are_due_ = true;
  ReplicatedModel model_;
  /// While `join` runs.
  std::optional<UnevenInputs> join_;
};

template <typename Module, typename... Rest>
DistributedDataParallel(std::shared_ptr<Module>, Rest...) -> DistributedDataParallel<Module>;
template <typename Holder, typename... Rest>
requires std::derived_from<Holder, torch::nn::ModuleHolder<typename Holder::ContainedType>>
DistributedDataParallel(const Holder&, Rest...)
->DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace libddp
