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
#include <utility>
#include <vector>

#include "libddp/ddp/output_tensors.h"
#include "libddp/ddp/replica.h"
#include "libddp/ddp/sparse_modules.h"
#include "libddp/group/process_group.h"

namespace libddp {

/// What a module holds, with full names.
inline NamedTensors named_parameters(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_parameters()) found.push_back({item.key(), item.value()});
  return found;
}
inline NamedTensors named_buffers(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_buffers()) found.push_back({item.key(), item.value()});
  return found;
}

/// `options` with the names of the parameters to which torch's own modules give sparse gradients.
inline DistributedDataParallelOptions with_sparse_parameters(DistributedDataParallelOptions options,
                                                             const torch::nn::Module& module) {
  for (std::string& name : sparse_parameters(module, named_parameters(module))) {
    options.sparse_parameters.push_back(std::move(name));
  }
  return options;
}

template <typename Module>
class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  /// Collective: every rank wraps the same model. Throws ArgumentError (see Replica).
  DistributedDataParallel(std::shared_ptr<Module> module, Group group, Options options = {})
      : module_(std::move(module)),
        broadcasts_buffers_(options.broadcast_buffers),
        replica_(named_parameters(*module_), named_buffers(*module_), std::move(group),
                 with_sparse_parameters(std::move(options), *module_)) {}
  /// For a module holder, such as torch::nn::Sequential.
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& holder, Group group,
                          Options options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}

  /// The module's own forward. The backward pass of its result averages gradients, unless gradients
  /// are off or a NoSync guard lives.
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    if (buffers_are_due_ && broadcasts_buffers_) replica_.broadcast(module_->buffers());
    auto output = module_->forward(std::forward<Arguments>(arguments)...);
    buffers_are_due_ = replica_.after_forward(output_tensors(output), synchronises_);
    return output;
  }

  /// While it lives, passes accumulate gradients locally:
  ///   { auto guard = model.no_sync(); model.forward(a).sum().backward(); }
  ///   model.forward(b).sum().backward();   // averages the sum of both
  class NoSync {
   public:
    explicit NoSync(bool& synchronises)
        : synchronises_(synchronises), before_(std::exchange(synchronises, false)) {}
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;
    ~NoSync() { synchronises_ = before_; }

   private:
    bool& synchronises_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(synchronises_); }

  Module& operator*() const { return *module_; }
  Module* operator->() const { return module_.get(); }
  const std::shared_ptr<Module>& module() const { return module_; }
  Replica& replica() { return replica_; }

 private:
  std::shared_ptr<Module> module_;
  bool broadcasts_buffers_;
  bool synchronises_ = true;
  /// torch's rule: before the first forward, and before each that follows a synchronising one.
  bool buffers_are_due_ = true;
  Replica replica_;
};

template <typename Module, typename... Rest>
DistributedDataParallel(std::shared_ptr<Module>, Rest...) -> DistributedDataParallel<Module>;
template <typename Holder, typename... Rest>
requires std::derived_from<Holder, torch::nn::ModuleHolder<typename Holder::ContainedType>>
DistributedDataParallel(const Holder&, Rest...)
->DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace libddp
