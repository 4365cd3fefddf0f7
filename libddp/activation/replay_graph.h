#pragma once

// The small graph that a CheckpointNode builds in backward. Either the backward pass under way runs
// it too, or it gets a pass of its own that collects the gradients of its leaves.
// Thread rule: made, used and destroyed by one thread.
//
//   if (auto* pass = pass_to_join()) {
//     JoiningGraph graph;
//     graph.gates.add(input, edge);   // for each input
//     graph.roots = run();
//     former = join_pass(*pass, edges, graph, reach, name);
//   }
//
//   ParameterCollectors collectors(parameters);   // the graph ends in them, not in the parameters
//   outputs = run();
//   require_own_graph(outputs, collectors.edges() and the inputs' edges, start, name);

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/autograd/node_pointer.h"

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

/// The backward pass that this thread runs, if a graph can join it: it visits whatever it reaches
/// and keeps nothing for another pass. Else nullptr.
torch::autograd::GraphTask* pass_to_join();

/// Each stands between an input of a graph that joins and the history that the input has outside,
/// so that a hook on the input sees what this graph gives it. One without hooks is left out: then
/// gradients are added up one by one, in the order that they have without checkpointing.
class InputGates {
 public:
  /// Gives `input` a history that leads to `onward`.
  void add(const at::Tensor& input, const torch::autograd::Edge& onward);

  /// Leads an edge past its gate, if that has no hooks.
  void pass_by(torch::autograd::Edge& edge) const;

 private:
  /// That of the first gate; the others follow.
  std::uint64_t first_number_ = 0;
  c10::SmallVector<NodePointer, 4> gates_;
};

struct JoiningGraph {
  /// Its nodes are numbered from here on.
  std::uint64_t start = at::sequence_number::peek();
  InputGates gates;
  torch::autograd::edge_list roots;
};

enum class Reach { kOwnOnly, kAnything };

/// Makes the graph a part of the backward pass under way, which then runs it as if it had been
/// there from the start: without a second pass of the engine, and each leaf is visited once.
/// `edges`: those of the node being run. They become the roots, and after them those former ones
/// whose nodes the graph does not reach. Returns the former ones. Throws CheckpointError as
/// require_own_graph, unless the graph may reach anything.
torch::autograd::edge_list join_pass(torch::autograd::GraphTask& pass,
                                     torch::autograd::edge_list& edges, JoiningGraph graph,
                                     Reach reach, const std::function<std::string()>& name);

/// When the joined graph starts to run, `node` gets its former edges back, and so lets go of the
/// graph: what is still to run is held by the pass. `start`: the graph's.
void restore_when_run(const NodePointer& node, torch::autograd::edge_list former,
                      std::uint64_t start);

}  // namespace libddp
