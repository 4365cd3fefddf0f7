#include "libddp/ddp/delayed_gradients.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

std::vector<at::Tensor> leaves_of(const NamedTensors& parameters) {
  std::vector<at::Tensor> leaves;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.is_leaf() || !tensor.requires_grad()) {
      throw ArgumentError(fmt::format(
          "libddp: delay_all_reduce_named_params: parameter '{}' does not require a gradient. "
          "Hint: name only parameters that are trained.",
          name));
    }
    leaves.push_back(tensor);
  }
  return leaves;
}

std::vector<at::Tensor> checked_trigger(const at::Tensor& trigger) {
  if (!trigger.defined() || !trigger.is_leaf() || !trigger.requires_grad()) {
    throw ArgumentError(
        "libddp: param_to_hook_all_reduce does not require a gradient, so the all-reduce would "
        "never run. Hint: pass a parameter that is trained.");
  }
  return {trigger};
}

/// One bucket for each dtype.
BucketPlan plan_by_dtype(const std::vector<ParameterSize>& sizes) {
  std::map<at::ScalarType, std::vector<std::size_t>> members;
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    members[sizes[index].dtype].push_back(index);
  }
  BucketPlan plan;
  for (auto& [dtype, indices] : members) plan.push_back(std::move(indices));
  return plan;
}

}  // namespace

std::shared_ptr<DelayedGradients> DelayedGradients::create(DelayedParameters delayed, Group group,
                                                           Rethrow rethrow) {
  return std::shared_ptr<DelayedGradients>(
      new DelayedGradients(std::move(delayed), std::move(group), std::move(rethrow)));
}

DelayedGradients::DelayedGradients(DelayedParameters delayed, Group group, Rethrow rethrow)
    : group_(std::move(group)),
      rethrow_(std::move(rethrow)),
      hooks_(leaves_of(delayed.parameters),
             [this](std::size_t index, const at::Tensor& /*incoming*/) {
               guarded([&] { on_gradient(index); });
             }),
      trigger_hook_(checked_trigger(delayed.trigger),
                    [this](std::size_t /*index*/, const at::Tensor& /*incoming*/) {
                      guarded([&] { on_trigger(); });
                    }) {
  const std::vector<ParameterSize> sizes = sizes_of(delayed.parameters);
  buckets_ = std::make_unique<GradientBuckets>(*group_, delayed.parameters, sizes,
                                               plan_by_dtype(sizes), true);
  for (std::size_t index = 0; index < delayed.parameters.size(); ++index) {
    slots_.emplace_back(delayed.parameters[index].name, delayed.parameters[index].tensor);
    if (!delayed.gradient_as_bucket_view) slots_.back().keep_apart();
    slots_.back().move_to(buckets_->view(index));
  }
  const c10::Device device = slots_.front().parameter().device();
  if (!device.is_cpu()) on_device_.emplace(device, slots_.size());
}

void DelayedGradients::renew_hooks() {
  hooks_.renew();
  trigger_hook_.renew();
}

void DelayedGradients::accept_gradients_of(at::ScalarType dtype) {
  for (GradientSlot& slot : slots_) slot.also_accept(dtype);
}

void DelayedGradients::arm(bool synchronises) { synchronises_ = synchronises; }

void DelayedGradients::on_gradient(std::size_t index) {
  if (on_device_) return on_device_->arrived(index);
  if (!slots_[index].is_apart()) slots_[index].adopt();
}

void DelayedGradients::on_trigger() {
  if (!synchronises_ || !pass_.expired()) return;
  const auto pass = std::make_shared<char>();
  pass_ = pass;
  call_after_backward([weak = weak_from_this(), pass] {
    if (const auto self = weak.lock()) self->guarded([&] { self->average(); });
  });
}

void DelayedGradients::average() {
  pass_.reset();
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    fill(bucket);
    if (group_->size() > 1) {
      group_->all_reduce(buckets_->flat(bucket), {.op = ReduceOp::Avg},
                         {.async = false, .timeout = {}, .label = "delayed gradients"});
    }
    if (!buckets_->has_tails()) share_flags(*group_, *buckets_);
    install(bucket);
  }
}

void DelayedGradients::fill(std::size_t bucket) {
  const std::vector<std::size_t>& members = buckets_->members(bucket);
  // The end of the pass: what is current is behind all that the pass and those before it have done.
  if (on_device_) on_device_->collect(slots_, members, std::vector<std::uint32_t>(slots_.size()));
  for (std::size_t member = 0; member < members.size(); ++member) {
    GradientSlot& slot = slots_[members[member]];
    if (!on_device_) slot.fill_without_gradient();
    buckets_->set_used(bucket, member, slot.has_gradient());
  }
}

void DelayedGradients::install(std::size_t bucket) {
  const std::vector<std::size_t>& members = buckets_->members(bucket);
  for (std::size_t member = 0; member < members.size(); ++member) {
    if (buckets_->is_used(bucket, member)) slots_[members[member]].install();
  }
}

template <typename Function>
void DelayedGradients::guarded(Function&& function) {
  if (!rethrow_) return function();
  try {
    function();
  } catch (const Error&) {
    rethrow_(std::current_exception());
    throw;
  }
}

}  // namespace libddp
