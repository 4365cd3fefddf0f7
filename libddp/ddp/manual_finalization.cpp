#include "libddp/ddp/manual_finalization.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"

namespace libddp {

ManualFinalization::ManualFinalization(std::string who, const BackwardPass& pass)
    : who_(std::move(who)), pass_(pass) {}

void ManualFinalization::set(bool on) {
  if (pass_.is_unfinished()) {
    throw StateError(
        "libddp: manual finalization can be switched only between backward passes. Hint: set it "
        "before forward, or after finalize_backward().");
  }
  is_on_ = on;
}

void ManualFinalization::check_may_finalize(bool is_complete, bool needs_pass_end) const {
  const auto refuse = [&](const char* why) {
    throw StateError(fmt::format("{} finalize_backward: {}", who_, why));
  };
  if (!is_on_) {
    refuse("backward passes end by themselves. Hint: set require_manual_backward_finalization.");
  }
  if (!pass_.is_unfinished()) {
    refuse("no backward pass waits for it. Hint: call it once after each synchronising backward.");
  }
  if (!pass_.are_all_sent() && !is_complete) {
    refuse("called before all gradients were there. Hint: call it after backward().");
  }
  if (needs_pass_end && is_nested_backward()) {
    refuse(
        "with mixed precision and with sparse gradients, the pass must be over. Hint: call it "
        "after backward().");
  }
}

void ManualFinalization::check_finalized() const {
  if (!pass_.is_unfinished()) return;
  throw StateError(fmt::format(
      "{} the last backward pass has sent {} of {} buckets and was not finished. Hint: {}.", who_,
      pass_.num_sent(), pass_.num_buckets(),
      is_on_ ? "call finalize_backward() after backward()"
             : "look for the exception that it raised"));
}

}  // namespace libddp
