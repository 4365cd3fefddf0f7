#include "libddp/ddp/pass_errors.h"

#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/first_line.h"

namespace libddp {

PassErrors::PassErrors(Group group, BackwardPass& pass, const BucketReduction& reduction,
                       std::function<void(std::exception_ptr)> rethrow)
    : group_(std::move(group)), pass_(pass), reduction_(reduction), rethrow_(std::move(rethrow)) {}

void PassErrors::tell_and_rethrow() {
  try {
    throw;
  } catch (const Error& error) {
    break_pass(std::string("in backward: ") + error.what(), Told::Explained);
    if (rethrow_) rethrow_(std::current_exception());
    throw;
  } catch (...) {
    break_pass(
        "in backward: " + reduction_.hook_failure() + first_line_of(std::current_exception()),
        Told::Error);
    // A hook may throw anything of the language that it is written in.
    if (reduction_.has_hook() && rethrow_) rethrow_(std::current_exception());
    throw;
  }
}

void PassErrors::break_off(const std::exception_ptr& error) noexcept {
  if (error) return break_pass("in backward: " + first_line_of(error), Told::Explained);
  break_pass("in backward: an exception ended it (its own output has the text)", Told::Error);
}

void PassErrors::break_pass(const std::string& what, Told told) noexcept {
  if (!pass_.is_running()) return;
  group_->report_error(what);
  pass_.told(told);
  pass_.break_off();
}

// Also before the pass has reached the model's outputs: the others are in theirs by now.
bool PassErrors::backward_failed(const std::string& what) noexcept {
  using Stage = BackwardPass::Stage;
  const bool is_known = pass_.stage() != Stage::None || std::exchange(is_refused_, false);
  if (pass_.stage() == Stage::None || pass_.is_explained()) return is_known;
  pass_.told(Told::Explained);
  group_->report_error("in backward: " + reduction_.hook_failure() + what);
  return is_known;
}

}  // namespace libddp
