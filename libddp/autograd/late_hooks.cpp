#include "libddp/autograd/late_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "libddp/autograd/accumulator.h"

namespace libddp {
namespace {

namespace autograd = torch::autograd;

using HookPtr = std::unique_ptr<autograd::PostAccumulateGradHook>;

}  // namespace

struct LateHooks::State {
  struct Entry {
    at::Tensor parameter;
    /// Autograd holds it weakly.
    AccumulatorPtr node;
    /// While autograd accumulates.
    HookPtr taken;
  };
  std::vector<Entry> entries;
};

/// Runs directly before the node accumulates.
class LateHooks::Taker final : public autograd::FunctionPreHook {
 public:
  Taker(std::weak_ptr<State> state, std::size_t index) : state_(std::move(state)), index_(index) {}

  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    if (const auto state = state_.lock()) {
      auto& [parameter, node, taken] = state->entries[index_];
      HookPtr& hook = autograd::impl::post_acc_grad_hooks(parameter);
      if (hook) taken = std::move(hook);
    }
    return grads;
  }

 private:
  // The node may outlive who asked for this: graphs refer to it.
  const std::weak_ptr<State> state_;
  const std::size_t index_;
};

LateHooks::LateHooks(const std::vector<at::Tensor>& parameters)
    : state_(std::make_shared<State>()) {
  for (const at::Tensor& parameter : parameters) {
    AccumulatorPtr node = accumulator_of(parameter);
    node->add_pre_hook(std::make_unique<Taker>(state_, state_->entries.size()));
    state_->entries.push_back({parameter, std::move(node), nullptr});
  }
}

LateHooks::~LateHooks() { put_all_back(); }

void LateHooks::put_back(std::size_t index) {
  auto& [parameter, node, taken] = state_->entries[index];
  if (!taken) return;
  HookPtr& hook = autograd::impl::post_acc_grad_hooks(parameter);
  if (!hook) hook = std::move(taken);
  taken = nullptr;
}

void LateHooks::put_all_back() {
  for (std::size_t index = 0; index < state_->entries.size(); ++index) put_back(index);
}

bool LateHooks::has(std::size_t index) const {
  return autograd::impl::post_acc_grad_hooks(state_->entries[index].parameter) != nullptr;
}

void LateHooks::run(std::size_t index) const {
  const at::Tensor& parameter = state_->entries[index].parameter;
  if (const HookPtr& hook = autograd::impl::post_acc_grad_hooks(parameter)) (*hook)(parameter);
}

}  // namespace libddp
