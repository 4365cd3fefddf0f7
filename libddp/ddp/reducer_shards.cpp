// Buckets and averages for optimizers that share the work.
//
// A bucket is cut into one block per rank: what that rank updates. Averages are everybody's as ever
// (ZeRO-1). Where they are sharded too (ZeRO-2's exchange), a reduce-scatter in place leaves the
// averages of its own block to each rank, and its own gradients in the rest; the flags behind the
// gradients travel in a message of their own.
//
// NOTE [Gradients on top of averages]
// A script may run a second pass without clearing `.grad`: what stands there then is an average,
// which the new gradients are added to, and the sum is averaged again. An average that all ranks
// have stays what it is. One that only its owner has does so if the owner multiplies it by the
// number of ranks and the others set their part to zero; that is done when such a pass begins,
// before autograd adds to it. Where that moment is not seen (outputs that nobody knows), the first
// gradient that was added in place is refused.
// The first pass averages everything on all ranks, because the buckets get their shape at its end.

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"
#include "libddp/ddp/reducer.h"

namespace libddp {

void Reducer::shard(bool averages) {
  const auto refuse = [](const char* why, const char* hint) {
    throw StateError(
        fmt::format("libddp: the optimizer's work cannot be shared: {}. Hint: {}.", why, hint));
  };
  if (has_owners_) {
    refuse("another optimizer shares it already", "wrap the model again for another one");
  }
  if (hook_) {
    refuse("a communication hook exchanges the gradients", "use an optimizer without shard_over");
  }
  if (!sparse_.indices().empty()) {
    refuse("some gradients are sparse", "use an optimizer without shard_over");
  }
  if (pass_.is_unfinished()) refuse("a backward pass runs", "make the optimizer before it");
  if (averages && !options_.gradient_as_bucket_view) {
    refuse("its gradients are no views of their buckets, of which it would share out the averages",
           "leave out gradient_as_bucket_view=False or shard_gradients");
  }
  claim_parameters();
  check_users();
  has_owners_ = true;
  scatters_averages_ = averages;
  const std::optional<BucketPlan> planned = std::exchange(planned_, std::nullopt);
  build_buckets(planned ? *planned : buckets_->plan());
  restart_pass(pass_.stage);
}

WorkPtr Reducer::average_block(std::size_t bucket, CallOptions call) {
  return group_->reduce_scatter_into(
      buckets_->block(bucket, group_->rank()), buckets_->gradients(bucket),
      {.op = ReduceOp::Avg, .scale = gradient_scale_}, std::move(call));
}

void Reducer::share_flags() {
  if (group_->size() == 1 || buckets_->size() == 0) return;
  const at::Tensor flags = buckets_->flags();
  group_->all_reduce(flags, {.op = ReduceOp::Max},
                     {.async = false, .timeout = {}, .label = "flags of the gradients"});
  buckets_->set_flags(flags);
}

void Reducer::mark_averages() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (slots_[index].shows_bucket()) gradient_states_[index] = GradientState::AveragedInPart;
  }
}

void Reducer::spread_averages() {
  if (!scatters_averages()) return;
  const c10::NoGradGuard no_grad;
  const int rank = group_->rank();
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (gradient_states_[index] != GradientState::AveragedInPart) continue;
    gradient_states_[index] = GradientState::Settled;
    if (!slots_[index].shows_bucket()) continue;
    const ElementRange own = buckets_->owned(index, rank);
    const at::Tensor whole = buckets_->flat_view(index);
    whole.narrow(0, 0, own.begin).zero_();
    whole.narrow(0, own.begin, own.numel()).mul_(group_->size());
    whole.narrow(0, own.end, whole.numel() - own.end).zero_();
  }
}

void Reducer::refuse_old_average(std::size_t index) const {
  if (!slots_[index].shows_bucket()) return;  // cleared meanwhile
  throw StateError(fmt::format(
      "{}: parameter '{}': its gradient was added to the average of an earlier pass, of which this "
      "rank has a part only. Hint: clear gradients before each pass that synchronises "
      "(optimizer.zero_grad()), or return tensors from forward() directly or in tuples, lists, "
      "dicts or dataclasses.",
      where(), slots_[index].name()));
}

void Reducer::arm_local_pass(const std::vector<at::Tensor>& outputs) {
  if (!scatters_averages()) return;
  output_leaves_ = nullptr;
  output_leaves_ = call_before_backward(outputs, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->spread_averages();
  });
}

void Reducer::check_averaged() const {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (!has_own(index)) continue;
    throw StateError(fmt::format(
        "{}: parameter '{}': its gradient has not been averaged, and each rank updates a part of "
        "it only. Hint: run the last backward pass before optimizer.step() outside of no_sync().",
        where(), slots_[index].name()));
  }
}

}  // namespace libddp
