#include "libddp/autograd/after_backward.h"

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

/// `make` gives each hook a callback of its own.
template <typename Make>
std::shared_ptr<void> hook_starts(const std::vector<at::Tensor>& outputs, const Make& make) {
  using Hook = StartHook<decltype(make())>;
  using Node = decltype(autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::shared_ptr<std::vector<Node>> leaves;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    if (const auto& node = output.grad_fn()) {
      node->add_pre_hook(std::make_unique<Hook>(make()));
      continue;
    }
    if (!leaves) leaves = std::make_shared<std::vector<Node>>();
    leaves->push_back(autograd::impl::grad_accumulator(output));
    leaves->back()->add_pre_hook(std::make_unique<Hook>(make()));
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
