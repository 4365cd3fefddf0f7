#include "libddp/autograd/accumulate_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <utility>

#include "libddp/autograd/accumulator.h"
#include "libddp/autograd/node_pointer.h"

namespace libddp {
namespace {

namespace autograd = torch::autograd;

using Shared = std::shared_ptr<const AccumulateHooks::OnGradient>;

class Hook final : public autograd::FunctionPostHook {
 public:
  Hook(Shared on_gradient, std::size_t index)
      : on_gradient_(std::move(on_gradient)), index_(index) {}

  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list& inputs) override {
    (*on_gradient_)(index_, inputs.at(0));
    return outputs;
  }

 private:
  Shared on_gradient_;
  std::size_t index_;
};

}  // namespace

struct AccumulateHooks::State {
  struct Registration {
    at::Tensor parameter;
    AccumulatorPtr node;
    std::uintptr_t key;
  };
  Shared on_gradient;
  std::vector<Registration> registrations;
};

AccumulateHooks::AccumulateHooks(const std::vector<at::Tensor>& parameters, OnGradient on_gradient)
    : state_(std::make_unique<State>()) {
  state_->on_gradient = std::make_shared<const OnGradient>(std::move(on_gradient));
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    AccumulatorPtr node = accumulator_of(parameters[index]);
    const std::uintptr_t key =
        node->add_post_hook(std::make_unique<Hook>(state_->on_gradient, index));
    state_->registrations.push_back({parameters[index], std::move(node), key});
  }
}

AccumulateHooks::~AccumulateHooks() {
  for (auto& [parameter, node, key] : state_->registrations) node->del_post_hook(key);
}

bool AccumulateHooks::has_made(const autograd::FunctionPostHook& hook) {
  return dynamic_cast<const Hook*>(&hook) != nullptr;
}

void AccumulateHooks::renew() {
  for (std::size_t index = 0; index < state_->registrations.size(); ++index) {
    auto& [parameter, node, key] = state_->registrations[index];
    if (is_accumulator_of(node, parameter)) continue;
    node->del_post_hook(key);
    node = accumulator_of(parameter);
    key = node->add_post_hook(std::make_unique<Hook>(state_->on_gradient, index));
  }
}

void AccumulateHooks::accept(std::optional<at::ScalarType> dtype) {
  for (auto& [parameter, node, key] : state_->registrations) {
    node->mutable_input_metadata(0).set_grad_dtype(dtype);
  }
}

void AccumulateHooks::reinstate() {
  for (auto& [parameter, node, key] : state_->registrations) {
    autograd::impl::set_grad_accumulator(parameter, weak(node));
  }
}

}  // namespace libddp
