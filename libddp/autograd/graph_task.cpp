#include "libddp/autograd/graph_task.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstddef>

namespace libddp {
namespace {

using torch::autograd::GraphTask;

/// torch names a member of the pass under way, not the pass.
GraphTask* task_of(const decltype(GraphTask::exec_info_)* member) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t offset = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  const auto* place = reinterpret_cast<const std::byte*>(member) - offset;
  return const_cast<GraphTask*>(reinterpret_cast<const GraphTask*>(place));
}

}  // namespace

GraphTask* current_graph_task() {
  const auto* const selection = torch::autograd::get_current_graph_task_exec_info();
  if (selection == nullptr) return nullptr;
  GraphTask* const task = task_of(selection);
  // A torch whose passes look otherwise is told by the number.
  const bool is_it = static_cast<int>(task->id_) == torch::autograd::get_current_graph_task_id();
  return is_it ? task : nullptr;
}

std::vector<at::Tensor> gradients_with_graph() {
  const GraphTask* const task = current_graph_task();
  if (task == nullptr) return {};
  std::vector<at::Tensor> found;
  const auto add = [&found](const at::Tensor& gradient) {
    if (gradient.defined() && gradient.grad_fn()) found.push_back(gradient);
  };
  for (const at::Tensor& gradient : task->captured_vars_) add(gradient);
  for (const torch::autograd::Node* const node : task->nodes_in_graph_) {
    const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (leaf != nullptr) add(leaf->variable.grad());
  }
  return found;
}

PassFailure PassFailure::of_current() {
  GraphTask* const task = current_graph_task();
  return task == nullptr ? PassFailure() : PassFailure(task->future_result_);
}

std::exception_ptr PassFailure::error() const {
  return result_ && result_->completed() && result_->hasError() ? result_->exception_ptr()
                                                                : nullptr;
}

}  // namespace libddp
