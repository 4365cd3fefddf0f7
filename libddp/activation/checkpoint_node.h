#pragma once

// One node of autograd's graph for a whole block. The forward pass runs without a graph; in
// backward the node runs the block again under grad, and the backward pass under way goes on in
// that small graph. Where it cannot (torch.autograd.grad, retain_graph=True, hooks on the node, a
// reentrant block within the block) the small graph gets a backward pass of its own.
//
// Two ways for the parameters' gradients:
//   explicit   the parameters are inputs of the node, so torch.autograd.grad works;
//   reentrant  the small graph leads to them (torch's use_reentrant=True).
// Thread rule: one forward pass and its backward passes at a time; while backward runs, no other
// thread may use the block's parameters.
//
//   std::vector<at::Tensor> outputs =
//       run_checkpointed(function, inputs, {.parameters = parameters, .name = name});

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace libddp {

/// A block: tensors in, tensors out.
using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

struct NodeSettings {
  /// Everything that requires a gradient and is used by the block, besides its inputs.
  std::vector<at::Tensor> parameters;
  bool preserve_random = true;
  bool is_reentrant = false;
  /// Whether an output that is a view must stay the very tensor that the block gave, and not only
  /// its data. May be empty.
  std::function<bool(const at::Tensor&)> must_stay = {};
  /// How an input becomes a tensor without history for the second run; may be empty.
  std::function<at::Tensor(const at::Tensor&)> detach = {};
  /// For messages only.
  std::function<std::string()> name;
};

/// function(inputs), recomputed in backward.
std::vector<at::Tensor> run_checkpointed(TensorFunction function,
                                         const std::vector<at::Tensor>& inputs,
                                         NodeSettings settings);

}  // namespace libddp
