#include "libddp/activation/checkpoint_node.h"

#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "libddp/activation/autocast_state.h"
#include "libddp/activation/block_outputs.h"
#include "libddp/activation/checkpoint_error.h"
#include "libddp/activation/random_state.h"
#include "libddp/activation/replay_graph.h"
#include "libddp/activation/saved_input.h"
#include "libddp/autograd/node_pointer.h"

namespace libddp {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

std::vector<c10::Device> devices_of_inputs(const std::vector<at::Tensor>& inputs) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& input : inputs) {
    if (input.defined()) add_random_device(devices, input.device());
  }
  return devices;
}

/// A cast made without grad must not serve a use with grad later, so the cache rests.
class CastCacheRest {
 public:
  CastCacheRest() { at::autocast::set_autocast_cache_enabled(false); }
  ~CastCacheRest() { at::autocast::set_autocast_cache_enabled(former_); }
  CastCacheRest(const CastCacheRest&) = delete;
  CastCacheRest& operator=(const CastCacheRest&) = delete;

 private:
  bool former_ = at::autocast::is_autocast_cache_enabled();
};

/// Whether a reentrant block has run on this thread within the block whose first run is under way.
thread_local bool has_run_reentrant = false;

/// Asks that for one block.
class ReentrantWithin {
 public:
  ReentrantWithin() { has_run_reentrant = false; }
  ~ReentrantWithin() { has_run_reentrant = has_run_reentrant || former_; }
  ReentrantWithin(const ReentrantWithin&) = delete;
  ReentrantWithin& operator=(const ReentrantWithin&) = delete;

 private:
  bool former_ = has_run_reentrant;
};

class CheckpointNode : public torch::autograd::Node {
 public:
  CheckpointNode(TensorFunction function, NodeSettings settings)
      : function_(std::move(function)), settings_(std::move(settings)) {}

  std::string name() const override { return "libddp::CheckpointNode"; }

  /// The block without a graph; its outputs get this node as their history.
  std::vector<at::Tensor> forward(const NodePointer& self, const std::vector<at::Tensor>& inputs);

  variable_list apply(variable_list&& gradients) override;

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override;

  void release_variables() override {
    is_released_ = true;
    inputs_.clear();
    function_ = nullptr;
  }

 private:
  /// A replay: the block's inputs, and where its differentiable outputs came from.
  struct Replay {
    std::vector<at::Tensor> inputs;
    edge_list roots;
    variable_list gradients;
  };

  void connect(const std::vector<at::Tensor>& inputs);
  void require_usable() const;
  std::vector<at::Tensor> inputs() const;
  std::vector<at::Tensor> leaves() const;
  std::vector<at::Tensor> continued_inputs(InputGates& gates) const;
  Replay replay(std::vector<at::Tensor> inputs, const variable_list& gradients);
  variable_list continue_pass(torch::autograd::GraphTask& pass, const variable_list& gradients);
  void require_roots(const Replay& run) const;
  variable_list explicit_gradients(const variable_list& gradients);
  variable_list reentrant_gradients(const variable_list& gradients);
  static variable_list backward_into_leaves(const Replay& run);
  std::string input_name(std::size_t i) const;

  TensorFunction function_;
  NodeSettings settings_;
  std::vector<SavedInput> inputs_;
  std::vector<char> input_requires_grad_;
  BlockOutputs outputs_;
  std::unique_ptr<RandomState> random_;
  AutocastState autocast_;
  bool is_released_ = false;
  /// A reentrant block uses tensors that it is not given, inputs of this block among them, and what
  /// it leads to shows only when it runs: too late for a pass under way, which may have run it.
  bool holds_reentrant_ = false;
};

void CheckpointNode::connect(const std::vector<at::Tensor>& inputs) {
  edge_list edges;
  for (const at::Tensor& input : inputs) {
    const bool is_defined = input.defined();  // a mask that is not there
    edges.push_back(is_defined ? torch::autograd::impl::gradient_edge(input)
                               : torch::autograd::Edge());
    inputs_.emplace_back(input);
    input_requires_grad_.push_back(is_defined && input.requires_grad());
  }
  for (const at::Tensor& parameter : settings_.parameters) {
    edges.push_back(torch::autograd::impl::gradient_edge(parameter));
  }
  set_next_edges(std::move(edges));
}

std::vector<at::Tensor> CheckpointNode::forward(const NodePointer& self,
                                                const std::vector<at::Tensor>& inputs) {
  const std::vector<c10::Device> devices = devices_of_inputs(inputs);
  connect(inputs);
  autocast_ = AutocastState::now(devices);
  if (settings_.preserve_random) {
    random_ = std::make_unique<RandomState>(RandomState::now(devices));
  }
  std::vector<at::Tensor> outputs;
  {
    const at::NoGradGuard no_grad;
    const CastCacheRest no_cache;
    const ReentrantWithin within;
    outputs = function_(inputs);
    holds_reentrant_ = has_run_reentrant;
  }
  if (random_ && random_->is_current()) random_.reset();
  refuse_transforms(outputs, settings_.name);
  outputs_.adopt(self, inputs, outputs, settings_.must_stay);
  return outputs;
}

std::string CheckpointNode::input_name(std::size_t i) const {
  return fmt::format("{}: input {}", settings_.name(), i);
}

void CheckpointNode::require_usable() const {
  TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (at::GradMode::is_enabled()) {
    throw StateError(fmt::format(
        "libddp checkpoint of {}: gradients of gradients (create_graph) need a graph of the block, "
        "which was not recorded. Hint: in Python use_reentrant=False records it; in C++ do not "
        "checkpoint this block.",
        settings_.name()));
  }
  if (settings_.is_reentrant && !Engine::get_default_engine().is_checkpoint_valid()) {
    throw StateError(fmt::format(
        "libddp checkpoint of {}: When use_reentrant=True, torch.utils.checkpoint is incompatible "
        "with .grad() "
        "or passing an `inputs` parameter to .backward(). To resolve this error, you can either "
        "set use_reentrant=False, or call .backward() without passing the `inputs` argument.",
        settings_.name()));
  }
}

std::vector<at::Tensor> CheckpointNode::inputs() const {
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const at::Tensor input = inputs_[i].unpack([&] { return input_name(i); });
    if (!input.defined()) {
      inputs.push_back(input);
    } else {
      // As detach() does it, at a fraction of its time.
      inputs.push_back(settings_.detach ? settings_.detach(input) : input.tensor_data());
    }
  }
  return inputs;
}

std::vector<at::Tensor> CheckpointNode::leaves() const {
  std::vector<at::Tensor> leaves = inputs();
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (input_requires_grad_[i]) leaves[i].set_requires_grad(true);
  }
  return leaves;
}

/// With the histories that they had in the forward pass, behind gates: hooks that the block puts on
/// an input are to see what this run gives it, not what comes from elsewhere.
std::vector<at::Tensor> CheckpointNode::continued_inputs(InputGates& gates) const {
  std::vector<at::Tensor> continued = inputs();
  for (std::size_t i = 0; i < continued.size(); ++i) {
    if (input_requires_grad_[i]) gates.add(continued[i], next_edge(i));
  }
  return continued;
}

CheckpointNode::Replay CheckpointNode::replay(std::vector<at::Tensor> inputs,
                                              const variable_list& gradients) {
  Replay replay;
  replay.inputs = std::move(inputs);
  const at::AutoGradMode grad_mode(true);
  const RandomScope random(random_.get());
  const AutocastScope autocast(autocast_);
  const std::vector<at::Tensor> outputs = function_(replay.inputs);
  if (outputs.size() != outputs_.size()) {
    throw CheckpointError(fmt::format(
        "libddp checkpoint of {}: the block gave {} tensors in the forward pass and {} in the "
        "recomputation. Hint: it must do the same each time it runs.",
        settings_.name(), outputs_.size(), outputs.size()));
  }
  std::size_t index = 0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs_.is_differentiable(i)) continue;
    const at::Tensor& gradient = gradients[index];
    const auto& metadata = input_metadata(index++);
    if (!gradient.defined() || !outputs[i].defined() || !outputs[i].requires_grad()) continue;
    if (!metadata.is_same_shape(outputs[i])) {
      throw CheckpointError(fmt::format(
          "libddp checkpoint of {}: output {} of the recomputation has shape [{}], other than in "
          "the forward pass. Hint: the block must do the same each time it runs.",
          settings_.name(), i, fmt::join(outputs[i].sizes(), ", ")));
    }
    replay.roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    replay.gradients.push_back(gradient);
  }
  return replay;
}

variable_list CheckpointNode::explicit_gradients(const variable_list& gradients) {
  const std::uint64_t start = at::sequence_number::peek();
  const ParameterCollectors collectors(settings_.parameters);
  const Replay run = replay(leaves(), gradients);
  edge_list ends;
  for (const at::Tensor& leaf : run.inputs) {
    ends.push_back(torch::autograd::impl::gradient_edge(leaf));
  }
  ends.insert(ends.end(), collectors.edges().begin(), collectors.edges().end());
  require_own_graph(run.roots, ends, start, settings_.name);

  variable_list results = backward_into_leaves(run);
  for (std::size_t i = 0; i < settings_.parameters.size(); ++i) {
    results.push_back(collectors.gradient(i));
  }
  return results;
}

variable_list CheckpointNode::backward_into_leaves(const Replay& run) {
  if (!run.roots.empty()) {
    Engine::get_default_engine().execute(run.roots, run.gradients, /*keep_graph=*/false,
                                         /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  variable_list results;
  for (const at::Tensor& leaf : run.inputs) results.push_back(leaf.grad());
  return results;
}

void CheckpointNode::require_roots(const Replay& run) const {
  if (!run.roots.empty()) return;
  throw StateError(fmt::format(
      "libddp checkpoint of {}: none of output has requires_grad=True, this checkpoint() is not "
      "necessary. Hint: use_reentrant=False allows it.",
      settings_.name()));
}

variable_list CheckpointNode::reentrant_gradients(const variable_list& gradients) {
  const Replay run = replay(leaves(), gradients);
  require_roots(run);
  return backward_into_leaves(run);
}

variable_list CheckpointNode::continue_pass(torch::autograd::GraphTask& pass,
                                            const variable_list& gradients) {
  JoiningGraph graph;
  Replay run = replay(continued_inputs(graph.gates), gradients);
  if (settings_.is_reentrant) require_roots(run);
  graph.roots = std::move(run.roots);
  const std::uint64_t start = graph.start;
  const Reach reach = settings_.is_reentrant ? Reach::kAnything : Reach::kOwnOnly;
  edge_list former = join_pass(pass, next_edges_, std::move(graph), reach, settings_.name);
  restore_when_run(getptr(), std::move(former), start);
  run.gradients.resize(next_edges_.size());
  return std::move(run.gradients);
}

variable_list CheckpointNode::apply(variable_list&& gradients) {
  require_usable();
  const bool is_idle = std::none_of(gradients.begin(), gradients.end(),
                                    [](const at::Tensor& gradient) { return gradient.defined(); });
  if (is_idle) return variable_list(num_outputs());
  outputs_.require_unchanged(settings_.name);
  // Hooks of users on this node are to see the gradients of its inputs.
  const bool may_join = post_hooks().empty() && !holds_reentrant_;
  if (auto* pass = may_join ? pass_to_join() : nullptr) return continue_pass(*pass, gradients);
  return settings_.is_reentrant ? reentrant_gradients(gradients) : explicit_gradients(gradients);
}

void CheckpointNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const {
  throw StateError(fmt::format(
      "libddp checkpoint of {}: compiled autograd cannot see what this node does. Hint: call "
      "torch.utils.checkpoint.checkpoint for this block, or do without compiled_autograd.",
      settings_.name()));
}

void require_leaves(const NodeSettings& settings) {
  for (std::size_t i = 0; i < settings.parameters.size(); ++i) {
    if (settings.parameters[i].is_leaf()) continue;
    throw ArgumentError(fmt::format(
        "libddp checkpoint of {}: parameter {} was computed from others. Hint: pass it as an input "
        "of the block.",
        settings.name(), i));
  }
}

bool requires_grad(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

}  // namespace

std::vector<at::Tensor> run_checkpointed(TensorFunction function,
                                         const std::vector<at::Tensor>& inputs,
                                         NodeSettings settings) {
  if (settings.is_reentrant) has_run_reentrant = true;
  if (!at::GradMode::is_enabled()) return function(inputs);
  refuse_transforms(inputs, settings.name);
  const bool is_needed = requires_grad(inputs) || requires_grad(settings.parameters);
  if (!is_needed) {
    // As torch's variant: without a graph, which nothing given here needs.
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> outputs = function(inputs);
    // What the block captures may belong to a transform that does need a graph.
    refuse_transforms(outputs, settings.name);
    return outputs;
  }
  require_leaves(settings);
  const auto node = make_node<CheckpointNode>(std::move(function), std::move(settings));
  return node->forward(node, inputs);
}

}  // namespace libddp
