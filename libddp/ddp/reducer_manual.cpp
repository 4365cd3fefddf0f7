// Passes that the script ends itself, so that communication outlasts them. See reducer.h.

#include <fmt/format.h>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"
#include "libddp/ddp/reducer.h"

namespace libddp {

void Reducer::set_manual_finish(bool manual) {
  if (pass_.is_unfinished()) {
    throw StateError(
        "libddp: manual finalization can be switched only between backward passes. Hint: set it "
        "before forward, or after finalize_backward().");
  }
  is_manual_ = manual;
}

bool Reducer::finishes_after_backward() const {
  return is_manual_ && (tolerates_unused() || needs_pass_end());
}

void Reducer::finish_backward() {
  const auto refuse = [&](const char* why) {
    const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
    throw StateError(fmt::format("{} finalize_backward: {}", me.where(), why));
  };
  if (!is_manual_) {
    refuse("backward passes end by themselves. Hint: set require_manual_backward_finalization.");
  }
  if (!pass_.is_unfinished()) {
    refuse("no backward pass waits for it. Hint: call it once after each synchronising backward.");
  }
  if (pass_.next_bucket < buckets_->size() && !is_complete()) {
    refuse("called before all gradients were there. Hint: call it after backward().");
  }
  if (needs_pass_end() && is_nested_backward()) {
    refuse(
        "with mixed precision and with sparse gradients, the pass must be over. Hint: call it "
        "after backward().");
  }
  finish_pass();
}

void Reducer::check_finished() const {
  if (!pass_.is_unfinished()) return;
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  throw StateError(fmt::format(
      "{} the last backward pass has sent {} of {} buckets and was not finished. Hint: {}.",
      me.where(), pass_.next_bucket, buckets_->size(),
      is_manual_ ? "call finalize_backward() after backward()"
                 : "look for the exception that it raised"));
}

}  // namespace libddp
