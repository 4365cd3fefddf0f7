#include "libddp/optim/adamw_shards.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/ddp/reducer.h"
#include "libddp/ddp/replicated_model.h"
#include "libddp/module/grad_norm.h"

namespace libddp {

void check_adamw_parameters(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    const bool is_sparse = parameter.grad().defined() && parameter.grad().is_sparse();
    if (!parameter.is_meta() && parameter.is_floating_point() && !is_sparse) continue;
    throw ArgumentError(fmt::format(
        "libddp: AdamW updates dense floating-point parameters with memory, this one is {} [{}]. "
        "Hint: use torch.optim for it.",
        is_sparse ? "with a sparse gradient"
                  : fmt::format("{} on {}", c10::toString(parameter.scalar_type()),
                                parameter.device().str()),
        fmt::join(parameter.sizes(), ", ")));
  }
}

AdamwShards::AdamwShards(ReplicatedModel& replica, const std::vector<at::Tensor>& parameters,
                         bool shard_gradients)
    : reducer_(replica.reducer().weak_from_this()),
      is_member_(replica.membership()),
      has_own_averages_only_(shard_gradients),
      parameters_(replica.trained_parameters()),
      group_(replica.group()) {
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    indices_.emplace(parameters_[index].tensor.unsafeGetTensorImpl(), index);
  }
  check(parameters);
  replica.shard(shard_gradients);
}

std::size_t AdamwShards::index_of(const at::Tensor& parameter) const {
  const auto found = indices_.find(parameter.unsafeGetTensorImpl());
  if (found != indices_.end()) return found->second;
  throw ArgumentError(fmt::format(
      "libddp: AdamW(shard_over=model): a parameter of the optimizer, [{}], is not one that the "
      "model trains. Hint: make another optimizer for what is not in the model.",
      fmt::join(parameter.sizes(), ", ")));
}

void AdamwShards::check(const std::vector<at::Tensor>& parameters) const {
  std::unordered_set<std::size_t> known;
  std::size_t number = 0;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    const auto found = indices_.find(parameter.unsafeGetTensorImpl());
    if (found == indices_.end()) {
      throw ArgumentError(fmt::format(
          "libddp: AdamW(shard_over=model): parameter {} of the optimizer, [{}], is not one that "
          "the model trains. Hint: make another optimizer for what is not in the model.",
          number, fmt::join(parameter.sizes(), ", ")));
    }
    known.insert(found->second);
    ++number;
  }
  if (known.size() == parameters_.size()) return;
  std::size_t missing = 0;
  while (known.contains(missing)) ++missing;
  const std::size_t more = parameters_.size() - known.size() - 1;
  throw ArgumentError(fmt::format(
      "libddp: AdamW(shard_over=model): the optimizer lacks '{}'{} of the model's trained "
      "parameters, whose gradients no other optimizer could use. Hint: pass all of them, in groups "
      "where they differ, or freeze what is not trained.",
      parameters_[missing].name, more > 0 ? fmt::format(" and {} more", more) : ""));
}

void AdamwShards::check_member() const {
  if (*is_member_) return;
  throw StateError(
      "libddp: AdamW(shard_over=model): the model has gone on in another process group (rejoin), "
      "and the optimizer has its part of the work in the one before. Hint: call the optimizer's "
      "rejoin() after the model's, where other ranks make theirs, and load the state after that.");
}

void AdamwShards::check_averaged() const {
  check_member();
  const auto reducer = reducer_.lock();
  if (!reducer) {
    throw StateError(
        "libddp: AdamW(shard_over=model): the model, or its process group, was replaced since the "
        "optimizer was made. Hint: make a new optimizer and load this one's state into it.");
  }
  reducer->check_averaged();
}

at::Tensor AdamwShards::own_gradient(std::size_t index) const {
  check_member();
  return sharded_->own_gradient(index);
}

bool AdamwShards::make_ready(bool amsgrad) {
  check_member();
  if (!sharded_) {
    const auto reducer = reducer_.lock();
    if (!reducer || !reducer->has_blocks()) return false;
    sharded_ = std::make_unique<ShardedParameters>(parameters_, group_, reducer->shared_buckets());
    positions_.resize(parameters_.size());
    std::size_t position = 0;
    for (const std::size_t index : sharded_->in_order()) positions_[index] = position++;
  }
  const std::size_t num_moments = amsgrad ? 3 : 2;
  while (moments_.size() < num_moments) moments_.push_back(sharded_->make_numbers());
  return true;
}

std::vector<std::size_t> AdamwShards::in_memory_order(
    const std::vector<std::size_t>& indices) const {
  std::vector<std::size_t> order(indices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return positions_[indices[a]] < positions_[indices[b]];
  });
  return order;
}

std::size_t AdamwShards::update(const std::vector<at::Tensor>& parameters,
                                const std::vector<at::Tensor>& steps, const AdamwOptions& options,
                                const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  std::vector<std::size_t> indices;
  for (const at::Tensor& parameter : parameters) indices.push_back(index_of(parameter));
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  AdamwState state;
  for (const std::size_t place : in_memory_order(indices)) {
    const std::size_t index = indices[place];
    values.push_back(sharded_->own(index));
    gradients.push_back(sharded_->own_gradient(index));
    state.exp_avgs.push_back(moments_[0]->own(index));
    state.exp_avg_sqs.push_back(moments_[1]->own(index));
    if (options.amsgrad) state.max_exp_avg_sqs.push_back(moments_[2]->own(index));
    state.steps.push_back(steps[place]);
  }
  return fused_adamw(values, gradients, state, options, grad_scale, found_inf);
}

at::Tensor AdamwShards::clip_grad_norm(double max_norm, double norm_type) {
  const c10::NoGradGuard no_grad;
  RankGradients all{.group = has_own_averages_only_ ? group_ : nullptr,
                    .dtype = parameters_.front().tensor.scalar_type(),
                    .gradients = {},
                    .device = parameters_.front().tensor.device()};
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const at::Tensor& parameter = parameters_[index].tensor;
    all.dtype = at::promote_types(all.dtype, parameter.scalar_type());
    const bool is_cut = has_own_averages_only_ && parameter.grad().defined();
    all.gradients.push_back(is_cut ? own_gradient(index) : parameter.grad());
  }
  const at::Tensor norm = total_norm({all}, norm_type);
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : parameters_) gradients.push_back(parameter.grad());
  scale_gradients(gradients, clip_factor(norm, max_norm));
  return norm;
}

const std::vector<std::string>& AdamwShards::moment_names() {
  static const std::vector<std::string> names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return names;
}

std::vector<at::Tensor> AdamwShards::moments(const at::Tensor& parameter) const {
  const std::size_t index = index_of(parameter);
  std::vector<at::Tensor> own;
  for (const auto& numbers : moments_) own.push_back(numbers->own(index));
  return own;
}

std::vector<at::Tensor> AdamwShards::new_moments(const at::Tensor& parameter) {
  std::vector<at::Tensor> own = moments(parameter);
  for (at::Tensor& moment : own) moment.zero_();
  return own;
}

std::vector<at::Tensor> AdamwShards::whole_moments(const at::Tensor& parameter) const {
  check_member();
  const std::size_t index = index_of(parameter);
  std::vector<at::Tensor> whole;
  for (const auto& numbers : moments_) whole.push_back(numbers->whole(index));
  return whole;
}

std::vector<at::Tensor> AdamwShards::load_moments(const at::Tensor& parameter,
                                                  const std::vector<at::Tensor>& whole) {
  check_member();
  const c10::NoGradGuard no_grad;
  const std::size_t index = index_of(parameter);
  for (std::size_t moment = 0; moment < moments_.size(); ++moment) {
    check_moment(moment, index, whole[moment]);
  }
  for (std::size_t moment = 0; moment < moments_.size(); ++moment) {
    moments_[moment]->load(index, whole[moment]);
  }
  return moments(parameter);
}

void AdamwShards::check_moment(std::size_t moment, std::size_t index,
                               const at::Tensor& whole) const {
  const auto& [name, parameter] = parameters_[index];
  if (!whole.defined() || whole.sizes() != parameter.sizes()) {
    throw ArgumentError(fmt::format(
        "libddp: AdamW(shard_over=model): the state to load: '{}' of '{}' {}, and the parameter "
        "has [{}]. Hint: load the state of an AdamW over the same model.",
        moment_names()[moment], name,
        whole.defined() ? fmt::format("has [{}]", fmt::join(whole.sizes(), ", ")) : "is missing",
        fmt::join(parameter.sizes(), ", ")));
  }
}

}  // namespace libddp
