#include "libddp/autograd/late_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/autograd/accumulator.h"

namespace libddp {
namespace {

namespace autograd = torch::autograd;

using HookPtr = std::unique_ptr<autograd::PostAccumulateGradHook>;
using NodeHooks = std::vector<std::unique_ptr<autograd::FunctionPostHook>>;

bool is_of_user(const NodeHooks::value_type& hook) { return !AccumulateHooks::has_made(*hook); }

void move_users_hooks(NodeHooks& from, NodeHooks& to) {
  const auto first = std::stable_partition(from.begin(), from.end(), std::not_fn(is_of_user));
  std::move(first, from.end(), std::back_inserter(to));
  from.erase(first, from.end());
}

}  // namespace

struct LateHooks::State {
  struct Entry {
    at::Tensor parameter;
    /// Autograd holds it weakly.
    AccumulatorPtr node;
    /// While autograd accumulates.
    HookPtr taken;
    NodeHooks taken_from_node;

    void put_node_hooks_back() { move_users_hooks(taken_from_node, node->post_hooks()); }
  };
  std::vector<Entry> entries;
};

/// Runs directly before the node accumulates.
class LateHooks::Taker final : public autograd::FunctionPreHook {
 public:
  Taker(std::weak_ptr<State> state, std::size_t index) : state_(std::move(state)), index_(index) {}

  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    if (const auto state = state_.lock()) {
      State::Entry& entry = state->entries[index_];
      HookPtr& hook = autograd::impl::post_acc_grad_hooks(entry.parameter);
      if (hook) entry.taken = std::move(hook);
      move_users_hooks(entry.node->post_hooks(), entry.taken_from_node);
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
    state_->entries.push_back({parameter, std::move(node), nullptr, {}});
  }
}

LateHooks::~LateHooks() { put_all_back(); }

void LateHooks::put_back(std::size_t index) {
  State::Entry& entry = state_->entries[index];
  if (!entry.taken) return;
  HookPtr& hook = autograd::impl::post_acc_grad_hooks(entry.parameter);
  if (!hook) hook = std::move(entry.taken);
  entry.taken = nullptr;
}

void LateHooks::put_all_back() {
  for (std::size_t index = 0; index < state_->entries.size(); ++index) {
    put_back(index);
    state_->entries[index].put_node_hooks_back();
  }
}

bool LateHooks::has(std::size_t index) const {
  const State::Entry& entry = state_->entries[index];
  const NodeHooks& hooks = entry.node->post_hooks();
  return !entry.taken_from_node.empty() || std::any_of(hooks.begin(), hooks.end(), is_of_user) ||
         autograd::impl::post_acc_grad_hooks(entry.parameter) != nullptr;
}

void LateHooks::run(std::size_t index) {
  State::Entry& entry = state_->entries[index];
  const at::Tensor parameter = entry.parameter;
  entry.put_node_hooks_back();
  const NodeHooks& hooks = entry.node->post_hooks();
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    if (is_of_user(hooks[i])) (*hooks[i])({}, {parameter.grad()});
  }
  if (const HookPtr& hook = autograd::impl::post_acc_grad_hooks(parameter)) (*hook)(parameter);
}

}  // namespace libddp
