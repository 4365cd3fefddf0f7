#include "libddp/fsdp/accumulated_gradients.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "libddp/fsdp/plain_tensor.h"

namespace libddp {

void AccumulatedGradients::put_aside() {
  if (is_aside_) return;
  is_aside_ = true;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const at::Tensor& parameter = spec_.parameters[i].tensor;
    if (!parameter.grad().defined() && !entries_[i].is_shown) continue;
    take_back(i, std::exchange(parameter.mutable_grad(), at::Tensor()));
  }
}

/// What `.grad` was, or what a script has made of it.
void AccumulatedGradients::take_back(std::size_t index, at::Tensor grad) {
  Entry& entry = entries_[index];
  if (!std::exchange(entry.is_shown, false)) {
    entry.aside = std::move(grad);
  } else if (grad.defined() && grad.sizes() == at::IntArrayRef(spec_.layout.shape(index))) {
    entry.waiting = std::move(grad);
  } else {  // cleared, or a shard in its place
    entry.aside = std::move(grad);
    entry.is_missing = false;
    if (!has_waiting()) clear_missing();
  }
}

void AccumulatedGradients::give_back() {
  if (!is_aside_) return;
  is_aside_ = false;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const at::Tensor& parameter = spec_.parameters[i].tensor;
    Entry& entry = entries_[i];
    if (shows_waiting_ && entry.waiting.defined()) {
      parameter.mutable_grad() = std::exchange(entry.waiting, at::Tensor());
      entry.is_shown = true;
      continue;
    }
    at::Tensor aside = std::exchange(entry.aside, at::Tensor());
    if (aside.defined() || parameter.grad().defined()) parameter.mutable_grad() = std::move(aside);
  }
}

bool AccumulatedGradients::keeps_any() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.aside.defined(); });
}

void AccumulatedGradients::let_kept_wait(std::size_t index) {
  Entry& entry = entries_[index];
  if (!entry.aside.defined() || entry.waiting.defined()) return;
  entry.waiting = std::exchange(entry.aside, at::Tensor());
}

void AccumulatedGradients::add_to_kept(const at::Tensor& mine, std::size_t index) {
  at::Tensor& grad = kept(index);
  if (!grad.defined()) {
    grad = mine.to(spec_.gradient_dtype, /*non_blocking=*/false, /*copy=*/true);
  } else if (grad.is_non_overlapping_and_dense()) {
    grad.add_(mine);
  } else {
    grad = grad.clone(at::MemoryFormat::Contiguous).add_(mine);  // several elements may be one
  }
}

/// In place, as autograd does it; in the dtype that it comes in where scripts see it, as in torch's
/// FSDP1, else in that of the average, as in its fully_shard.
void AccumulatedGradients::add(const at::Tensor& grad, std::size_t index) {
  const c10::NoGradGuard no_grad;
  entries_[index].is_missing = false;
  at::Tensor& waiting = entries_[index].waiting;
  if (!waiting.defined()) {
    const at::ScalarType dtype = shows_waiting_ ? grad.scalar_type() : spec_.reduce_dtype;
    const bool fits = is_plain(grad) && grad.scalar_type() == dtype;
    waiting =
        fits ? grad.detach() : at::empty(grad.sizes(), grad.options().dtype(dtype)).copy_(grad);
  } else if (waiting.is_non_overlapping_and_dense()) {
    waiting.add_(grad);
  } else {
    waiting = waiting.clone(at::MemoryFormat::Contiguous).add_(grad);
  }
}

bool AccumulatedGradients::has_waiting() const {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].waiting.defined() || shows_waiting(i)) return true;
  }
  return false;
}

bool AccumulatedGradients::is_in(const at::Tensor& block) const {
  return block.defined() && std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
           return entry.waiting.defined() && entry.waiting.is_alias_of(block);
         });
}

void AccumulatedGradients::mark_missing(std::size_t index) {
  if (!entries_[index].waiting.defined()) entries_[index].is_missing = true;
}

void AccumulatedGradients::clear_waiting(std::size_t index) {
  entries_[index].waiting = at::Tensor();
  entries_[index].is_missing = false;
}

void AccumulatedGradients::clear_missing() {
  for (Entry& entry : entries_) entry.is_missing = false;
}

bool AccumulatedGradients::shows_waiting(std::size_t index) const {
  return entries_[index].is_shown && spec_.parameters[index].tensor.grad().defined();
}

bool AccumulatedGradients::shows_larger_gradients() const {
  return spec_.has_shards_apart() && shows_waiting_ && has_waiting();
}

void AccumulatedGradients::end_copy(std::size_t index, bool keep) {
  at::Tensor& grad = spec_.parameters[index].tensor.mutable_grad();
  Entry& entry = entries_[index];
  const bool waits = entry.waiting.defined();
  at::Tensor kept = std::exchange(waits ? entry.waiting : entry.aside, at::Tensor());
  if (keep && grad.defined()) {
    const FlatLayout::Shape shape = spec_.layout.shard_shape(index, spec_.rank());
    const at::Tensor shard = spec_.shard_in_whole(grad, index).view(shape);
    const c10::Device home = spec_.home_options(shard.scalar_type()).device();
    kept =
        kept.defined() ? kept.copy_(shard) : shard.to(home, /*non_blocking=*/false, /*copy=*/true);
  }
  const bool was_cleared = keep && !grad.defined();
  grad = was_cleared ? at::Tensor() : std::move(kept);
  entry.is_shown = waits;
}

}  // namespace libddp
