#pragma once

// The small graph that a CheckpointNode builds in backward, and the gradients of its leaves.
// Thread rule: made, used and destroyed by one thread.
//
//   ParameterCollectors collectors(parameters);   // the graph ends in them, not in the parameters
//   outputs = run();
//   require_own_graph(outputs, collectors.edges() and the inputs' edges, start, name);

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/activation/node_pointer.h"

namespace libddp {

/// Within its life, graphs over the parameters end in nodes of ours. The parameters' own nodes,
/// with the users' hooks on them, then run in the outer backward pass only.
class ParameterCollectors {
 public:
  /// REQUIRES: leaves.
  explicit ParameterCollectors(const std::vector<at::Tensor>& parameters);
  ~ParameterCollectors();
  ParameterCollectors(const ParameterCollectors&) = delete;
  ParameterCollectors& operator=(const ParameterCollectors&) = delete;

  /// Where each parameter's gradient arrives; an empty edge if it requires none.
  const torch::autograd::edge_list& edges() const { return edges_; }

  /// What has arrived; undefined if nothing.
  at::Tensor gradient(std::size_t index) const;

 private:
  struct Swapped {
    at::Tensor parameter;
    NodePointer own;
  };
  struct Collector;

  std::vector<Swapped> swapped_;
  std::vector<Collector*> collectors_;
  /// Own the collectors.
  torch::autograd::edge_list edges_;
};

/// Throws CheckpointError if the graph of `roots` reaches something that requires a gradient and is
/// not in `ends`: its gradient would be lost. `start` = at::sequence_number::peek() before the run.
void require_own_graph(const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& ends, std::uint64_t start,
                       const std::function<std::string()>& name);

}  // namespace libddp
