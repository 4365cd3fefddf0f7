#pragma once

// Modules that become sharded units of their own inside a model, as FSDP's wrapping does.
//
// A unit is whole while its module runs. Python's modules have hooks for that, LibTorch's have not,
// so a forward of the model runs such a module in one of two ways: as an element of a Sequential
// (fully_shard_each), with no change of the model's code, or through sharded_forward. Names,
// parameters and the module objects stay what they were.
// Thread rule: collectives of the group, parts first, then FullyShardedDataParallel of the model.
//
//   libddp::fully_shard_each(net->blocks, {.shard = group});   // of a torch::nn::Sequential
//
//   libddp::fully_shard(net->head, {.shard = group});          // any module; in the net's forward
//   at::Tensor y = libddp::sharded_forward(*head, x);          // in place of head->forward(x)
//
//   libddp::FullyShardedDataParallel model(net, {.shard = group});

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>
#include <utility>

#include "libddp/fsdp/shard_options.h"
#include "libddp/fsdp/wrapped_module.h"
#include "libddp/module/module_tensors.h"

namespace libddp {

/// Makes `module` a unit. Throws ArgumentError: it is wrapped already, a parameter belongs to
/// another unit, is not on the device of the first one, or the ranks' modules differ.
/// `name`: for messages; empty = the module's class.
inline void fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                        const ShardOptions& options, const std::string& name = {}) {
  required(module, "fully_shard");
  WrappedModule::wrap(module, name.empty() ? module->name() : name, options);
}
template <typename Module>
void fully_shard(const torch::nn::ModuleHolder<Module>& holder, const ShardOptions& options,
                 const std::string& name = {}) {
  fully_shard(holder.ptr(), options, name);
}

/// Makes every element of `sequential` that has parameters a unit. They take and return a tensor.
void fully_shard_each(torch::nn::SequentialImpl& sequential, const ShardOptions& options);
inline void fully_shard_each(const torch::nn::Sequential& sequential, const ShardOptions& options) {
  fully_shard_each(*sequential.ptr(), options);
}

/// module.forward(arguments...) with whole parameters, floating-point inputs in param_dtype; a
/// module that is not a unit just runs.
template <std::derived_from<torch::nn::Module> Module, typename... Arguments>
auto sharded_forward(Module& module, Arguments&&... arguments) {
  const std::shared_ptr<WrappedModule> wrapped = WrappedModule::find(module);
  const auto dtype = wrapped ? wrapped->input_dtype() : std::nullopt;
  const auto forward = [&] {
    return module.forward(in_dtype(std::forward<Arguments>(arguments), dtype)...);
  };
  return wrapped ? wrapped->run(forward) : forward();
}
template <typename Module, typename... Arguments>
auto sharded_forward(const torch::nn::ModuleHolder<Module>& holder, Arguments&&... arguments) {
  return sharded_forward(*holder.ptr(), std::forward<Arguments>(arguments)...);
}

}  // namespace libddp
