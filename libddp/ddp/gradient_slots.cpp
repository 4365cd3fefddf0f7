#include "libddp/ddp/gradient_slots.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {

GradientSlots::GradientSlots(const NamedTensors& parameters, std::string where,
                             std::optional<bool> as_bucket_view)
    : where_(std::move(where)), states_(parameters.size(), State::Settled) {
  for (const auto& [name, tensor] : parameters) {
    slots_.emplace_back(name, tensor, where_);
    if (!as_bucket_view) {
      slots_.back().keep_given(true);
    } else if (!*as_bucket_view) {
      slots_.back().keep_apart();
    }
  }
  if (slots_.empty()) return;
  const c10::Device device = slots_.front().parameter().device();
  if (!device.is_cpu()) on_device_.emplace(device, slots_.size());
}

void GradientSlots::take(std::size_t index, bool in_pass, bool keeps_none) {
  State& state = states_[index];
  if (state == State::AveragedInPart) refuse_old_average(index);
  GradientSlot& slot = slots_[index];
  if (!slot.has_gradient() && (keeps_none || !in_pass)) {
    state = State::None;
    if (on_device_) return on_device_->came_without(index);
    if (in_pass) slot.fill_without_gradient();
    return;
  }
  state = State::Own;
  // With create_graph=True autograd has put a tensor there that has a graph of its own.
  const bool stays_apart = slot.is_apart() || c10::GradMode::is_enabled();
  if (on_device_) {
    slot.check_gradient();
    on_device_->arrived(index);
    // Its bucket gets it with the others, see `collect`.
    if (stays_apart || !in_pass) slot.take_dtype();
    return;
  }
  if (stays_apart && !in_pass) return slot.take_dtype();
  if (!stays_apart) return slot.adopt();
  slot.copy_to_bucket();
  state = State::Copied;
}

void GradientSlots::take_without_bucket(std::size_t index, bool keeps_none) {
  states_[index] = keeps_none && !slots_[index].has_gradient() ? State::None : State::Own;
}

void GradientSlots::refuse_old_average(std::size_t index) const {
  if (!slots_[index].shows_bucket()) return;  // cleared meanwhile
  throw StateError(fmt::format(
      "{}: parameter '{}': its gradient was added to the average of an earlier pass, of which this "
      "rank has a part only. Hint: clear gradients before each pass that synchronises "
      "(optimizer.zero_grad()), or return tensors from forward() directly or in tuples, lists, "
      "dicts or dataclasses.",
      where_, slots_[index].name()));
}

void GradientSlots::collect(const std::vector<std::size_t>& members,
                            const std::vector<std::uint32_t>& num_fired) {
  for (const std::size_t index : members) {
    if (num_fired[index] == 0 && is_kept(index)) slots_[index].stay_apart();
  }
  if (!on_device_) {
    for (const std::size_t index : members) {
      if (num_fired[index] == 0) fill_without_gradient(index);
    }
    return;
  }
  on_device_->collect(slots_, members, num_fired);
  for (const std::size_t index : members) {
    const bool has_fired = num_fired[index] > 0 && !has_got_none(index);
    const bool has_any = has_fired || has_own(index);
    if (has_any && !slots_[index].shows_bucket()) states_[index] = State::Copied;
  }
}

bool GradientSlots::is_kept(std::size_t index) const {
  const GradientSlot& slot = slots_[index];
  return slot.keeps_given() && slot.has_gradient() && !has_own(index);
}

void GradientSlots::fill_without_gradient(std::size_t index) {
  const bool is_copy = slots_[index].is_apart() && has_own(index);
  slots_[index].fill_without_gradient();
  if (is_copy) states_[index] = State::Copied;
}

bool GradientSlots::has_own(std::size_t index) const {
  const bool is_own = states_[index] == State::Own || states_[index] == State::Copied;
  return is_own && slots_[index].has_gradient();
}

void GradientSlots::forget_copies() {
  std::replace(states_.begin(), states_.end(), State::Copied, State::Own);
}

void GradientSlots::install_copies() {
  std::vector<GradientSlot*> copied;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (states_[index] == State::Copied) copied.push_back(&slots_[index]);
  }
  install(copied);
}

void GradientSlots::settle() { states_.assign(states_.size(), State::Settled); }

void GradientSlots::mark_averaged_in_part() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (slots_[index].shows_bucket()) states_[index] = State::AveragedInPart;
  }
}

bool GradientSlots::take_averaged_in_part(std::size_t index) {
  if (states_[index] != State::AveragedInPart) return false;
  states_[index] = State::Settled;
  GradientSlot& slot = slots_[index];
  if (!slot.has_gradient()) return false;
  // A script has put another tensor there, which it has made from that average.
  if (!slot.shows_bucket()) slot.adopt();
  return slot.shows_bucket();
}

void GradientSlots::also_accept(at::ScalarType dtype) {
  for (GradientSlot& slot : slots_) slot.also_accept(dtype);
  converts_ = true;
}

void GradientSlots::stay_in_buckets() {
  for (GradientSlot& slot : slots_) slot.keep_given(false);
}

void GradientSlots::claim() {
  for (GradientSlot& slot : slots_) slot.user().claim();
}

void GradientSlots::check_users(const std::function<std::string()>& where) const {
  if (!ParameterUser::is_any_common()) return;
  for (const GradientSlot& slot : slots_) {
    if (!slot.user().is_disputed()) continue;
    throw StateError(fmt::format(
        "{}: parameter '{}' is trained by another DistributedDataParallel model too, and one of "
        "the two has mixed_precision or an optimizer with shard_over, which does not go together. "
        "Hint: delete the wrapper (and its optimizer) that is not used any more, or wrap both "
        "without these.",
        where(), slot.name()));
  }
}

void GradientSlots::check_averaged() const {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (!has_own(index)) continue;
    throw StateError(fmt::format(
        "{}: parameter '{}': its gradient has not been averaged, and each rank updates a part of "
        "it only. Hint: run the last backward pass before optimizer.step() outside of no_sync().",
        where_, slots_[index].name()));
  }
}

}  // namespace libddp
