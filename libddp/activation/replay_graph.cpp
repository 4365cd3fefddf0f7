#include "libddp/activation/replay_graph.h"

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "libddp/activation/checkpoint_error.h"
#include "libddp/autograd/graph_task.h"

namespace libddp {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::GraphTask;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Whether a node belongs to what was there before the run: a leaf, or a node of another thread or
/// an older one.
class Foreign {
 public:
  explicit Foreign(std::uint64_t start) : start_(start) {}

  bool operator()(const Node& node) const {
    const std::uint64_t number = node.sequence_nr();
    return number < start_ || number == kLeaf || node.thread_id() != thread_;
  }

 private:
  /// torch's number for nodes that accumulate, and ours for collectors.
  static constexpr std::uint64_t kLeaf = UINT64_MAX;

  std::uint64_t start_;
  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
};

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

/// Adds a graph to what a pass still has to run: how many gradients each node waits for.
class Joining {
 public:
  /// `former`: the edges that the graph replaces.
  Joining(GraphTask& pass, const edge_list& former, const JoiningGraph& graph, Reach reach)
      : pass_(pass), gates_(graph.gates), is_foreign_(graph.start), reach_(reach) {
    for (const Edge& edge : former) {
      if (edge.is_valid()) ends_.push_back({edge.function.get()});
    }
    std::sort(ends_.begin(), ends_.end(),
              [](const End& a, const End& b) { return std::less<>()(a.node, b.node); });
  }

  void walk(edge_list& roots, const std::function<std::string()>& name) {
    visit(roots, name);
    // What is found goes to its end.
    for (std::size_t i = 0; i < found_.size(); ++i) visit(found_[i]->next_edges(), name);
    if (!has_hooks_) return;
    // Hooks of several tensors ask which of them the pass will run.
    pass_.nodes_in_graph_.insert(found_.begin(), found_.end());
  }

  /// After the walk: whether the graph reaches the node, which then no longer waits for `edge`.
  bool takes_over(const Edge& former) {
    const End* end = find(former.function.get());
    if (end == nullptr || !end->is_reached) return false;
    --pass_.dependencies_[end->node];
    return true;
  }

 private:
  struct End {
    Node* node;
    bool is_reached = false;
  };

  void visit(edge_list& edges, const std::function<std::string()>& name) {
    for (Edge& edge : edges) {
      if (!edge.is_valid()) continue;
      gates_.pass_by(edge);
      visit(edge.function.get(), name);
    }
  }

  void visit(Node* node, const std::function<std::string()>& name) {
    const auto [waiting, is_new] = pass_.dependencies_.try_emplace(node, 0);
    ++waiting->second;
    if (is_foreign_(*node)) {
      // The first of equal ones stands for all.
      End* end = find(node);
      if (end != nullptr) {
        end->is_reached = true;
      } else if (reach_ == Reach::kOwnOnly) {
        refuse(*node, name);
      }
    } else if (is_new && !node->tensor_pre_hooks().empty()) {
      has_hooks_ = true;
    }
    if (is_new) found_.push_back(node);
  }

  End* find(const Node* node) {
    const auto found =
        std::lower_bound(ends_.begin(), ends_.end(), node, [](const End& end, const Node* wanted) {
          return std::less<const Node*>()(end.node, wanted);
        });
    return found != ends_.end() && found->node == node ? &*found : nullptr;
  }

  GraphTask& pass_;
  const InputGates& gates_;
  Foreign is_foreign_;
  Reach reach_;
  c10::SmallVector<End, 32> ends_;
  /// Nodes that the pass did not have, in the order in which they were found.
  c10::SmallVector<Node*, 32> found_;
  bool has_hooks_ = false;
};

struct GateNode : public Node {
  GateNode(const at::Tensor& input, edge_list&& onward) : Node(std::move(onward)) {
    add_input_metadata(input);
  }

  std::string name() const override { return "libddp::InputGate"; }

  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
};

class RestoreEdges : public torch::autograd::FunctionPreHook {
 public:
  RestoreEdges(const NodePointer& node, edge_list former)
      : node_(weak(node)), edges_(std::move(former)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (const auto node = node_.lock()) restore(*node);
    node_.reset();
    edges_.clear();
    return gradients;
  }

 private:
  void restore(Node& node) {
    // A thread of another device may still be at the node's edges.
    GraphTask* pass = pass_to_join();
    if (pass == nullptr) return;
    const std::lock_guard lock(pass->mutex_);
    node.next_edges().swap(edges_);
  }

  decltype(weak(NodePointer())) node_;
  edge_list edges_;
};

}  // namespace

GraphTask* pass_to_join() {
  const auto* to_visit = torch::autograd::get_current_graph_task_exec_info();
  if (to_visit == nullptr || !to_visit->empty()) return nullptr;
  return torch::autograd::get_current_graph_task_keep_graph() ? nullptr : current_graph_task();
}

void InputGates::add(const at::Tensor& input, const Edge& onward) {
  edge_list edges;
  edges.push_back(onward);
  NodePointer node = make_node<GateNode>(input, std::move(edges));
  if (gates_.empty()) first_number_ = node->sequence_nr();
  torch::autograd::impl::set_gradient_edge(input, Edge(node, 0));
  gates_.push_back(std::move(node));
}

void InputGates::pass_by(Edge& edge) const {
  const std::uint64_t index = edge.function->sequence_nr() - first_number_;
  // Other threads give their nodes the same numbers.
  if (index >= gates_.size() || gates_[index] != edge.function) return;
  Node& node = *gates_[index];
  if (node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty() &&
      node.pre_hooks().empty() && node.post_hooks().empty()) {
    edge = node.next_edge(0);
  }
}

edge_list join_pass(GraphTask& pass, edge_list& edges, JoiningGraph graph, Reach reach,
                    const std::function<std::string()>& name) {
  const std::lock_guard lock(pass.mutex_);
  Joining joining(pass, edges, graph, reach);
  joining.walk(graph.roots, name);
  edge_list joined = std::move(graph.roots);
  for (const Edge& edge : edges) {
    if (edge.is_valid() && !joining.takes_over(edge)) joined.push_back(edge);
  }
  edges.swap(joined);
  return joined;
}

void restore_when_run(const NodePointer& node, edge_list former, std::uint64_t start) {
  const Foreign is_foreign(start);
  const edge_list& joined = node->next_edges();
  const auto own = std::find_if(joined.begin(), joined.end(),
                                [&](const Edge& edge) { return !is_foreign(*edge.function); });
  if (own == joined.end()) return;
  own->function->add_pre_hook(std::make_unique<RestoreEdges>(node, std::move(former)));
}

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
  const Foreign is_foreign(start);
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
    if (is_foreign(*node)) refuse(*node, name);
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
}

}  // namespace libddp
