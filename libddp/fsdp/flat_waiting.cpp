// What `.grad` of a FlatParameter shows between passes, and what is kept beside it: averages, and
// whole gradients that wait to be averaged.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/flat_parameter.h"

namespace libddp {

void FlatParameter::put_gradients_aside() {
  if (gradients_are_aside_) return;
  gradients_are_aside_ = true;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (!parameter.grad().defined() && !members_[i].shows_waiting) continue;
    take_back(i, std::exchange(parameter.mutable_grad(), at::Tensor()));
  }
}

/// What `.grad` was, or what a script has made of it.
void FlatParameter::take_back(std::size_t index, at::Tensor grad) {
  Member& member = members_[index];
  if (!std::exchange(member.shows_waiting, false)) {
    member.aside = std::move(grad);
  } else if (grad.defined() && grad.sizes() == member.full.sizes()) {
    member.waiting = std::move(grad);
  } else {  // cleared, or a shard in its place
    member.aside = std::move(grad);
    member.gradient = Gradient::None;
    if (has_waiting()) return;
    for (Member& other : members_) {
      if (other.gradient == Gradient::Absent) other.gradient = Gradient::None;
    }
  }
}

bool FlatParameter::has_waiting() const {
  for (std::size_t i = 0; i < size(); ++i) {
    if (members_[i].waiting.defined() || shows_waiting(i)) return true;
  }
  return false;
}

bool FlatParameter::shows_waiting(std::size_t index) const {
  return members_[index].shows_waiting && parameters_[index].tensor.grad().defined();
}

bool FlatParameter::shows_larger_gradients() const {
  return is_sharded() && shows_waiting_ && has_waiting();
}

void FlatParameter::give_gradients_back() {
  if (!gradients_are_aside_) return;
  gradients_are_aside_ = false;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    Member& member = members_[i];
    if (shows_waiting_ && member.waiting.defined()) {
      parameter.mutable_grad() = std::exchange(member.waiting, at::Tensor());
      member.shows_waiting = true;
      continue;
    }
    at::Tensor aside = std::exchange(member.aside, at::Tensor());
    if (aside.defined() || parameter.grad().defined()) parameter.mutable_grad() = std::move(aside);
  }
}

/// The gradients of earlier passes, which stay what they are until the average is there.
void FlatParameter::fill_in_waiting() {
  for (std::size_t i = 0; i < size(); ++i) {
    if (!members_[i].waiting.defined()) continue;
    copy_in(members_[i].waiting, i);
    members_[i].gradient = Gradient::Here;
  }
}

/// Whether gradients that wait are in the memory of the last averages.
bool FlatParameter::is_block_waiting() const {
  return gradient_block_.defined() &&
         std::any_of(members_.begin(), members_.end(), [this](const Member& member) {
           return member.waiting.defined() && member.waiting.is_alias_of(gradient_block_);
         });
}

void FlatParameter::check_copies(const CopyOptions& options) const {
  if (!options.with_gradients || !shows_larger_gradients()) return;
  throw StateError(fmt::format(
      "libddp {}: gradients of passes under no_sync wait to be averaged, so this rank has none of "
      "the whole averages. Hint: run a backward pass that synchronises before, or zero_grad().",
      label_));
}

}  // namespace libddp
