#include "libddp/autograd/after_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "libddp/autograd/node_pointer.h"

namespace libddp {
namespace {

namespace autograd = torch::autograd;

/// Is this pass a plain backward(), which runs all nodes that it reaches?
bool accumulates_everywhere() {
  const auto* const selection = autograd::get_current_graph_task_exec_info();
  return selection == nullptr || selection->empty();
}

template <typename Callback>
class StartHook final : public autograd::FunctionPreHook {
 public:
  explicit StartHook(Callback callback) : callback_(std::move(callback)) {}

  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    callback_(accumulates_everywhere());
    return grads;
  }

 private:
  Callback callback_;
};

/// The outputs that are leaves, as long as their hooks shall be called: such a leaf (a parameter
/// that a model returns) outlives many forwards, and is used apart from them.
class OutputLeaves {
 public:
  void add(NodePointer leaf) { leaves_.push_back(std::move(leaf)); }
  void add_other(const NodePointer& node) { others_.push_back(weak(node)); }

  /// Inside a pass that accumulates and reaches one of the leaves: whether it is one through the
  /// forward. The first is; of a later one that reaches nothing else the leaf's own use is the
  /// reason.
  bool is_reached() {
    const int task = autograd::get_current_graph_task_id();
    if (first_task_ == kNone) first_task_ = task;
    if (first_task_ == task) return true;
    const auto* const nodes = autograd::get_current_graph_task_nodes_in_graph();
    return std::any_of(others_.begin(), others_.end(), [&](const WeakNode& other) {
      const NodePointer node = other.lock();
      return node && nodes != nullptr && nodes->count(node.get()) > 0;
    });
  }

 private:
  using WeakNode = decltype(weak(NodePointer()));
  static constexpr int kNone = -1;
  std::vector<NodePointer> leaves_;
  std::vector<WeakNode> others_;
  int first_task_ = kNone;
};

/// Of one leaf.
class LeafHook final : public autograd::FunctionPreHook {
 public:
  LeafHook(std::weak_ptr<OutputLeaves> leaves, std::function<void(bool)> callback)
      : leaves_(std::move(leaves)), callback_(std::move(callback)) {}

  bool is_over() const { return leaves_.expired(); }

  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    const auto leaves = leaves_.lock();
    const bool accumulates = accumulates_everywhere();
    if (leaves && (!accumulates || leaves->is_reached())) callback_(accumulates);
    return grads;
  }

 private:
  const std::weak_ptr<OutputLeaves> leaves_;
  const std::function<void(bool)> callback_;
};

void hook_leaf(autograd::Node& leaf, std::unique_ptr<LeafHook> hook) {
  // Those of earlier forwards would be one more in each.
  std::erase_if(leaf.pre_hooks(), [](const std::unique_ptr<autograd::FunctionPreHook>& each) {
    const auto* const before = dynamic_cast<const LeafHook*>(each.get());
    return before != nullptr && before->is_over();
  });
  leaf.add_pre_hook(std::move(hook));
}

/// `make` gives each hook a callback of its own.
template <typename Make>
std::shared_ptr<void> hook_starts(const std::vector<at::Tensor>& outputs, const Make& make) {
  using Hook = StartHook<decltype(make())>;
  std::shared_ptr<OutputLeaves> leaves;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<Hook>(make()));
      continue;
    }
    if (!leaves) leaves = std::make_shared<OutputLeaves>();
    NodePointer leaf = autograd::impl::grad_accumulator(output);
    hook_leaf(*leaf, std::make_unique<LeafHook>(leaves, make()));
    leaves->add(std::move(leaf));
  }
  if (!leaves) return nullptr;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.grad_fn()) leaves->add_other(output.grad_fn());
  }
  return leaves;
}

}  // namespace

std::shared_ptr<void> call_before_backward(const std::vector<at::Tensor>& outputs,
                                           const std::function<void()>& callback) {
  return hook_starts(outputs, [&callback] {
    // Not const, so that it is moved from here on.
    return [callback = std::function<void()>(callback)](bool accumulates) {
      if (accumulates) callback();
    };
  });
}

std::shared_ptr<void> call_before_any_backward(const std::vector<at::Tensor>& outputs,
                                               const std::function<void(bool)>& callback) {
  return hook_starts(outputs, [&callback] { return callback; });
}

void call_after_backward(std::function<void()> callback) {
  autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool is_nested_backward() { return autograd::get_current_node() != nullptr; }

}  // namespace libddp
