#include "libddp/ddp/after_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace libddp {
namespace {

namespace autograd = torch::autograd;

/// Is this pass a plain backward(), which runs all nodes that it reaches?
bool accumulates_everywhere() {
  const auto* const selection = autograd::get_current_graph_task_exec_info();
  return selection == nullptr || selection->empty();
}

class StartHook final : public autograd::FunctionPreHook {
 public:
  explicit StartHook(std::function<void()> callback) : callback_(std::move(callback)) {}

  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    if (accumulates_everywhere()) callback_();
    return grads;
  }

 private:
  std::function<void()> callback_;
};

}  // namespace

std::shared_ptr<void> call_before_backward(const std::vector<at::Tensor>& outputs,
                                           const std::function<void()>& callback) {
  using Node = decltype(autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::shared_ptr<std::vector<Node>> leaves;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<StartHook>(callback));
      continue;
    }
    if (!leaves) leaves = std::make_shared<std::vector<Node>>();
    leaves->push_back(autograd::impl::grad_accumulator(output));
    leaves->back()->add_pre_hook(std::make_unique<StartHook>(callback));
  }
  return leaves;
}

void call_after_backward(std::function<void()> callback) {
  autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool is_nested_backward() { return autograd::get_current_node() != nullptr; }

}  // namespace libddp
