// The shape of the buckets, and the state of a pass before it begins. See reducer.h.

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"
#include "libddp/ddp/reducer.h"
#include "libddp/memory/empty_cache.h"

namespace libddp {

void Reducer::set_static_graph() {
  if (!is_learning_ || pass_.is_unfinished()) {
    throw StateError(
        "libddp: the static graph must be declared before the first backward pass. Hint: pass "
        "static_graph=True to DistributedDataParallel.");
  }
  const bool had_usage = tolerates_unused();
  options_.static_graph = true;
  // Nothing is complete before the end of the first pass: only then the counts are known.
  num_expected_.assign(num_expected_.size(), std::numeric_limits<std::uint32_t>::max());
  if (had_usage) return;
  build_buckets(buckets_->plan());
  restart_pass(pass_.stage);
}

void Reducer::set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (has_owners_) {
    throw StateError(
        "libddp: a communication hook cannot exchange the gradients of an optimizer whose work is "
        "shared. Hint: "
        "make the optimizer without shard_over.");
  }
  if (hook_) {
    throw StateError(
        "libddp: register_comm_hook or register_builtin_comm_hook can only be called once. Hint: "
        "wrap the model again to use another hook.");
  }
  if (!is_learning_ || pass_.is_unfinished()) {
    throw StateError(
        "libddp: a communication hook must be registered before the first backward pass. Hint: "
        "call register_comm_hook right after wrapping the model.");
  }
  hook_.emplace(std::move(hook), group_, sparse_.indices().size(),
                [this](std::size_t bucket) { timeline_.done(bucket); });
}

// The buckets of the dense gradients.
BucketPlan Reducer::plan_of(std::vector<std::size_t> order) const {
  std::erase_if(order, [&](std::size_t index) { return sparse_.contains(index); });
  return plan_buckets(sizes_, order, options_.limits);
}

void Reducer::accept_gradients_of(at::ScalarType dtype) {
  for (GradientSlot& slot : slots_) slot.also_accept(dtype);
  sparse_.also_accept(dtype);
}

void Reducer::follow_dtypes() {
  if (has_owners_) {
    throw ArgumentError(
        "libddp: the parameters have another dtype than when an optimizer began to share its work "
        "over their ranks. Hint: convert the model first, then wrap it and make the optimizer.");
  }
  check_last_pass();
  static std::atomic<bool> has_told{false};
  tell_once(has_told, "dtype_changed",
            "parameters have another dtype than when they were wrapped; their gradients are "
            "averaged all the same, torch's DDP stops doing so");
  sizes_ = sizes_of(parameters_);
  sparse_.follow_dtypes();
  is_learning_ = true;
  planned_ = std::nullopt;
  build_buckets(plan_of(reverse_order(parameters_.size())));
  restart_pass(pass_.stage);
}

void Reducer::build_buckets(BucketPlan plan) {
  buckets_ = nullptr;
  for (GradientSlot& slot : slots_) slot.leave_bucket();
  buckets_ =
      std::make_shared<GradientBuckets>(*group_, parameters_, sizes_, std::move(plan),
                                        tolerates_unused(), has_owners_ ? group_->size() : 1);
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (!sparse_.contains(index)) slots_[index].move_to(buckets_->view(index));
  }
  // What the last ones had and these don't fit into, and what the model came through when it was
  // wrapped: no step asks for that again.
  empty_cache();
  describe_layout();
}

void Reducer::describe_layout() {
  const bool is_rebuilt = !is_learning_ && !planned_;
  BucketLayout layout = describe_buckets(*group_, parameters_, *buckets_, is_rebuilt);
  for (const std::size_t index : sparse_.indices()) {
    layout.sparse_names.push_back(parameters_[index].name);
  }
  timeline_.set_layout(std::make_shared<const BucketLayout>(std::move(layout)));
}

void Reducer::rebuild_if_planned() {
  if (!planned_) return;
  build_buckets(*std::exchange(planned_, std::nullopt));
}

std::vector<std::size_t> Reducer::agreed_order() {
  std::vector<std::size_t> order;
  std::vector<std::uint8_t> seen(slots_.size(), 0);
  const auto append = [&](std::size_t index) {
    if (!std::exchange(seen[index], std::uint8_t{1})) order.push_back(index);
  };
  for (const std::size_t index : pass_.fired_order) append(index);
  pass_.fired_order = {};
  // What did not fire comes last: no bucket waits for it before the end of a pass.
  for (const std::size_t index : reverse_order(slots_.size())) append(index);

  if (group_->size() == 1 || order.empty()) return order;
  at::Tensor shared = at::empty({static_cast<std::int64_t>(order.size())}, at::kLong);
  auto* const data = shared.mutable_data_ptr<std::int64_t>();
  std::copy(order.begin(), order.end(), data);
  group_->broadcast(shared, 0, {.async = false, .timeout = {}, .label = "order of gradients"});
  std::copy(data, data + order.size(), order.begin());
  return order;
}

void Reducer::restart_pass(ReducerPass::Stage stage) {
  pass_.restart(stage, *buckets_, num_expected_);
  if (hook_) hook_->forget();
  // Of a pass that failed before anything was sent: its copies are nobody's any more.
  std::replace(gradient_states_.begin(), gradient_states_.end(), GradientState::Copied,
               GradientState::Own);
}

void Reducer::claim_parameters() {
  for (GradientSlot& slot : slots_) slot.user().claim();
}

void Reducer::check_users() const {
  for (const GradientSlot& slot : slots_) {
    if (!slot.user().is_disputed()) continue;
    const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
    throw StateError(fmt::format(
        "{} forward: parameter '{}' is trained by another DistributedDataParallel model too, and "
        "one of the two has mixed_precision or an optimizer with shard_over, which does not go "
        "together. Hint: delete the wrapper (and its optimizer) that is not used any more, or wrap "
        "both without these.",
        me.where(), slot.name()));
  }
}

void Reducer::check_last_pass() {
  if (const std::exception_ptr failure = group_->failure()) std::rethrow_exception(failure);
  if (!pass_.is_unfinished()) return;
  if (is_manual_ && pass_.next_bucket == buckets_->size()) check_finished();
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  if (pass_.stage == Stage::Reopened) {
    throw StateError(fmt::format(
        "{} forward: the last backward pass ended inside another one before all gradients were "
        "there, so nothing was averaged. Hint: return tensors from forward() directly or in "
        "tuples, lists, dicts or dataclasses, or use checkpoint(..., use_reentrant=False).",
        me.where()));
  }
  refuse_rest_of_last_pass(me.where() + " forward");
}

// A pass that failed before anything was sent has cost nothing: the ranks still agree.
void Reducer::refuse_rest_of_last_pass(const std::string& now) const {
  if (pass_.next_bucket == 0) return;
  throw StateError(fmt::format(
      "{}: the last backward pass ended early, after {} of {} buckets had been sent, so the "
      "gradients of the ranks differ. Hint: look for the exception that it raised; a job that "
      "wants to go on restarts from a checkpoint.",
      now, pass_.next_bucket, buckets_->size()));
}

}  // namespace libddp
