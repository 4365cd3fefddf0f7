#include "libddp/optim/adamw.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/module/each_once.h"
#include "libddp/optim/adamw_shards.h"
#include "libddp/optim/fused_adamw.h"

namespace libddp {
namespace {

using Tensors = std::vector<at::Tensor>;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

const AdamWOptions& options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const AdamWOptions&>(group.options());
}

AdamwOptions fused_options(const AdamWOptions& options, bool maximize) {
  const auto [beta1, beta2] = options.betas();
  return {options.lr(),      beta1,   beta2, options.eps(), options.weight_decay(),
          options.amsgrad(), maximize};
}

/// In the order of AdamwShards.
Tensors moments_of(const AdamWParamState& state) {
  return {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()};
}

void set_moments(AdamWParamState& state, const Tensors& moments) {
  state.exp_avg(moments[0]);
  state.exp_avg_sq(moments[1]);
  if (moments.size() > 2) state.max_exp_avg_sq(moments[2]);
}

/// Two updates in a step would be those of a learning rate twice as large, and of no other
/// optimizer.
std::vector<torch::optim::OptimizerParamGroup> with_each_once(
    std::vector<torch::optim::OptimizerParamGroup> groups) {
  std::unordered_set<const void*> known;
  for (auto& group : groups) {
    group.params() = each_once(group.params());
    for (const at::Tensor& parameter : group.params()) {
      if (known.insert(parameter.unsafeGetTensorImpl()).second) continue;
      throw ArgumentError(
          fmt::format("libddp: AdamW: a parameter of shape [{}] is in two groups. Hint: give each "
                      "group parameters of its own.",
                      fmt::join(parameter.sizes(), ", ")));
    }
  }
  return groups;
}

}  // namespace

/// With the step as the kernel wants it.
struct AdamW::ParamState : AdamWParamState {
  explicit ParamState(c10::Device device, const AdamWParamState& state = {})
      : AdamWParamState(state),
        count(at::full({}, static_cast<double>(step()),
                       at::TensorOptions().dtype(at::kFloat).device(device))) {}

  at::Tensor count;
};

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
             const AdamWOptions& defaults, AdamWExtras extras)
    : torch::optim::AdamW(with_each_once(groups), defaults), maximize_(extras.maximize) {
  if (extras.shard_over == nullptr) {
    if (!extras.shard_gradients) return;
    throw ArgumentError(
        "libddp: AdamW: shard_gradients without shard_over. Hint: pass the replicated model of the "
        "model "
        "whose gradients they are.");
  }
  const Tensors parameters = all_parameters();
  shards_ = std::make_unique<AdamwShards>(*extras.shard_over, parameters, extras.shard_gradients);
  num_checked_ = parameters.size();
}

AdamW::AdamW(Tensors parameters, const AdamWOptions& defaults, AdamWExtras extras)
    : AdamW(std::vector<torch::optim::OptimizerParamGroup>{std::move(parameters)}, defaults,
            extras) {}

AdamW::~AdamW() = default;

Tensors AdamW::all_parameters() const {
  Tensors all;
  for (const auto& group : param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  if (shards_ && !begin()) return loss;
  for (auto& group : param_groups()) update(group);
  if (shards_) shards_->publish();
  return loss;
}

// Waits for all ranks; false where no pass has synchronised, so nothing is due.
bool AdamW::begin() {
  const Tensors all = all_parameters();
  if (all.size() != num_checked_) shards_->check(all);  // add_param_group tells nobody
  num_checked_ = all.size();
  shards_->check_averaged();
  if (!make_ready()) return false;
  shards_->begin_update();
  return true;
}

bool AdamW::make_ready() {
  const bool was_ready = shards_->is_ready();
  const auto& groups = param_groups();
  const bool amsgrad = std::any_of(groups.begin(), groups.end(),
                                   [](const auto& group) { return options_of(group).amsgrad(); });
  if (!shards_->make_ready(amsgrad)) return false;
  if (!was_ready) cut_state();
  return true;
}

void AdamW::update(torch::optim::OptimizerParamGroup& group) {
  Tensors parameters;
  for (const at::Tensor& parameter : group.params()) {
    if (parameter.grad().defined()) parameters.push_back(parameter);
  }
  if (parameters.empty()) return;
  check_adamw_parameters(parameters);
  const AdamwOptions options = fused_options(options_of(group), maximize_);
  const std::vector<ParamState*> states = states_of(parameters, options.amsgrad);
  Tensors gradients;
  AdamwState state;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    state.steps.push_back(states[i]->count);
    if (shards_) continue;
    gradients.push_back(parameters[i].grad());
    state.exp_avgs.push_back(states[i]->exp_avg());
    state.exp_avg_sqs.push_back(states[i]->exp_avg_sq());
    if (options.amsgrad) state.max_exp_avg_sqs.push_back(states[i]->max_exp_avg_sq());
  }
  if (shards_) {
    shards_->update(parameters, state.steps, options);
  } else {
    fused_adamw(parameters, gradients, state, options);
  }
  for (ParamState* const one : states) one->step(one->step() + 1);
}

std::vector<AdamW::ParamState*> AdamW::states_of(const Tensors& parameters, bool amsgrad) {
  Tensors fresh;
  for (const at::Tensor& parameter : parameters) {
    if (state_.find(parameter.unsafeGetTensorImpl()) == state_.end()) fresh.push_back(parameter);
  }
  if (!fresh.empty()) add_states(fresh, amsgrad);
  std::vector<ParamState*> states;
  for (const at::Tensor& parameter : parameters) {
    auto& entry = state_.at(parameter.unsafeGetTensorImpl());
    // What was loaded, or put there by hand, is torch's own.
    if (dynamic_cast<ParamState*>(entry.get()) == nullptr) {
      entry = std::make_unique<ParamState>(parameter.device(),
                                           static_cast<const AdamWParamState&>(*entry));
    }
    states.push_back(static_cast<ParamState*>(entry.get()));
    at::Tensor& count = states.back()->count;  // on a device it counts by itself
    if (count.is_cpu())
      *count.mutable_data_ptr<float>() = static_cast<float>(states.back()->step());
  }
  return states;
}

void AdamW::add_states(const Tensors& parameters, bool amsgrad) {
  const AdamwState zeros = shards_ ? AdamwState{} : make_adamw_state(parameters, amsgrad);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto state = std::make_unique<ParamState>(parameters[i].device());
    if (shards_) {
      set_moments(*state, shards_->new_moments(parameters[i]));
    } else {
      state->exp_avg(zeros.exp_avgs[i]);
      state->exp_avg_sq(zeros.exp_avg_sqs[i]);
      if (amsgrad) state->max_exp_avg_sq(zeros.max_exp_avg_sqs[i]);
    }
    state_[parameters[i].unsafeGetTensorImpl()] = std::move(state);
  }
}

void AdamW::make_states(const Tensors& parameters, bool amsgrad) {
  if (!shards_) states_of(parameters, amsgrad);
}

at::Tensor AdamW::clip_grad_norm(double max_norm, double norm_type) {
  if (!shards_) {
    throw StateError(
        "libddp: AdamW::clip_grad_norm is for an optimizer with shard_over. Hint: call "
        "libddp::clip_grad_norm for sharded units, torch::nn::utils::clip_grad_norm_ otherwise.");
  }
  shards_->check_averaged();
  if (!make_ready()) {
    throw StateError(
        "libddp: AdamW::clip_grad_norm: no backward pass has averaged gradients yet. Hint: call it "
        "between backward() and step().");
  }
  return shards_->clip_grad_norm(max_norm, norm_type);
}

void AdamW::rejoin(ReplicatedModel& replica) {
  if (!shards_) return;
  const Tensors parameters = all_parameters();
  const bool shards_gradients = shards_->shards_gradients();
  shards_ = std::make_unique<AdamwShards>(replica, parameters, shards_gradients);
  num_checked_ = parameters.size();
  state_.clear();
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  const auto whole = with_whole_state();
  if (!whole) return torch::optim::AdamW::save(archive);
  whole->save(archive);
}

std::unique_ptr<torch::optim::AdamW> AdamW::with_whole_state() const {
  if (shards_) shards_->check_member();
  if (!shards_ || !shards_->is_ready()) return nullptr;
  auto whole = std::make_unique<torch::optim::AdamW>(param_groups(),
                                                     static_cast<const AdamWOptions&>(defaults()));
  for (const at::Tensor& parameter : all_parameters()) {
    const auto entry = state().find(parameter.unsafeGetTensorImpl());
    if (entry == state().end()) continue;
    AdamWParamState copy = static_cast<const AdamWParamState&>(*entry->second);
    set_moments(copy, shards_->whole_moments(parameter));
    whole->state()[entry->first] = std::make_unique<AdamWParamState>(std::move(copy));
  }
  return whole;
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  if (shards_) shards_->check_member();
  auto before = std::exchange(state_, {});
  try {
    torch::optim::AdamW::load(archive);
  } catch (...) {
    state_ = std::move(before);
    throw;
  }
  cut_state();
}

void AdamW::cut_state() {
  if (!shards_ || !shards_->is_ready()) return;
  for (const at::Tensor& parameter : all_parameters()) {
    const auto entry = state_.find(parameter.unsafeGetTensorImpl());
    if (entry == state_.end()) continue;
    auto& state = static_cast<AdamWParamState&>(*entry->second);
    set_moments(state, shards_->load_moments(parameter, moments_of(state)));
  }
}

}  // namespace libddp
