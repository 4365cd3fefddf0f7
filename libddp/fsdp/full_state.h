#pragma once

// The state of a sharded torch::nn::Module as whole tensors by name, and back.
// Thread rule: collectives, between steps.
//
//   FullState state = full_state(*model, *module);
//   torch::save(state.at("head.weight"), "head.pt");
//   load_full_state(*model, *module, state);

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <string>

namespace libddp {

class ShardedModel;

/// Parameters and buffers by their names in the module, on the CPU, in their own dtype.
using FullState = std::map<std::string, at::Tensor>;

/// Runs `function` while all parameters show copies of the whole tensors. `writeback`: changes
/// become the parameters' values, each rank takes what it owns, unless `function` throws on any
/// rank: PeerError on those where it does not.
void with_full_params(ShardedModel& model, const std::function<void()>& function, bool writeback);

FullState full_state(ShardedModel& model, const torch::nn::Module& module);
/// Throws ArgumentError that names what is missing, unknown or of another shape, PeerError on ranks
/// whose own state fits; nothing is changed then.
void load_full_state(ShardedModel& model, const torch::nn::Module& module, const FullState& state);

}  // namespace libddp
