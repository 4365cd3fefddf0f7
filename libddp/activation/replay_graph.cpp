#include "libddp/activation/replay_graph.h"

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

#include "libddp/activation/checkpoint_error.h"

namespace libddp {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

/// Belongs to what was there before the run: a leaf, or a node of another thread or an older one.
bool is_foreign(const Node& node, std::uint64_t start) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr ||
         node.thread_id() != at::RecordFunction::currentThreadId() || node.sequence_nr() < start;
}

[[noreturn]] void refuse(const Node& node, const std::function<std::string()>& name) {
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
  const std::string what =
      leaf == nullptr
          ? "a tensor that " + node.name() + " made outside the block"
          : fmt::format("a leaf of shape [{}]", fmt::join(leaf->variable.sizes(), ", "));
  throw CheckpointError(fmt::format(
      "libddp checkpoint of {}: the block uses {}, which requires a gradient and is neither an "
      "input nor among the parameters given: its gradient would be lost. Hint: pass it.",
      name(), what));
}

}  // namespace

/// Stands in a parameter's AccumulateGrad node's place and keeps what arrives.
struct ParameterCollectors::Collector : public Node {
  explicit Collector(const at::Tensor& parameter) : Node(/*sequence_nr=*/UINT64_MAX) {
    add_input_metadata(parameter);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradient = std::move(gradients[0]);
    return {};
  }

  at::Tensor gradient;
};

ParameterCollectors::ParameterCollectors(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) {
      collectors_.push_back(nullptr);
      edges_.emplace_back();
      continue;
    }
    auto collector = make_node<Collector>(parameter);
    collectors_.push_back(collector.get());
    NodePointer node = std::move(collector);
    swapped_.push_back({parameter, torch::autograd::impl::grad_accumulator(parameter)});
    torch::autograd::impl::set_grad_accumulator(parameter, weak(node));
    edges_.emplace_back(std::move(node), 0);
  }
}

ParameterCollectors::~ParameterCollectors() {
  // Backwards: a parameter may be given twice, or be swapped by an outer block already.
  for (auto swapped = swapped_.rbegin(); swapped != swapped_.rend(); ++swapped) {
    torch::autograd::impl::set_grad_accumulator(swapped->parameter, weak(swapped->own));
  }
}

at::Tensor ParameterCollectors::gradient(std::size_t index) const {
  return collectors_[index] != nullptr ? collectors_[index]->gradient : at::Tensor();
}

void require_own_graph(const edge_list& roots, const edge_list& ends, std::uint64_t start,
                       const std::function<std::string()>& name) {
  std::unordered_set<const Node*> seen;
  for (const Edge& end : ends) seen.insert(end.function.get());
  std::vector<const Node*> open;
  const auto visit = [&](const Edge& edge) {
    const Node* node = edge.function.get();
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const Edge& root : roots) visit(root);
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (is_foreign(*node, start)) refuse(*node, name);
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
}

}  // namespace libddp
