#include "libddp/fsdp/flat_gradient.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "libddp/base/error.h"

namespace libddp {

FlatGradient::FlatGradient(const FlatSpec& spec, const std::shared_ptr<BufferPool>& pool,
                           AccumulatedGradients& accumulated)
    : spec_(spec),
      accumulated_(accumulated),
      store_(GradientStore::make(spec, pool, accumulated)),
      arrivals_(spec.size(), Arrival::None) {}

void FlatGradient::begin_pass(bool averages) {
  if (pass_) return;
  pass_.emplace();
  pass_->averages = averages;
  accumulated_.put_aside();
  const bool adds_to_kept = !averages && !spec_.has_shards_apart() && accumulated_.shows_waiting();
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    const bool is_trained = spec_.parameters[i].tensor.requires_grad();
    arrivals_[i] = is_trained ? Arrival::Awaited : Arrival::None;
    pass_->num_awaited += is_trained;
    if (is_trained && adds_to_kept) accumulated_.let_kept_wait(i);
  }
  pass_->trains_all = pass_->num_awaited == spec_.size();
}

bool FlatGradient::accumulate(std::size_t index) {
  at::Tensor& grad = spec_.parameters[index].tensor.mutable_grad();
  if (!grad.defined()) return false;
  check(grad, index);
  if (pass_->averages) {
    store_->add(grad, index);
  } else {
    accumulated_.add(grad, index);
  }
  grad = at::Tensor();
  const Arrival now = pass_->averages ? Arrival::Here : Arrival::None;
  const Arrival before = std::exchange(arrivals_[index], now);
  return before == Arrival::Awaited && --pass_->num_awaited == 0;
}

void FlatGradient::check(const at::Tensor& grad, std::size_t index) const {
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw StateError(fmt::format("libddp {}: the gradient of parameter '{}' {}. Hint: {}.",
                                 spec_.label, spec_.parameters[index].name, what, hint));
  };
  if (!pass_ || pass_->stage != Stage::Gradients) {
    refuse(
        "came again after it had been averaged, and it has hooks that run once per average",
        "where a module runs several times under checkpoint(use_reentrant=True), each run brings "
        "gradients of its own; use_reentrant=False brings them at once");
  }
  if (grad.layout() != at::kStrided) {
    refuse("is sparse", "use sparse=False in the embedding");
  }
  const at::IntArrayRef shape(spec_.layout.shape(index));
  if (grad.sizes() != shape) {
    refuse(fmt::format("has the shape [{}], but the parameter [{}]", fmt::join(grad.sizes(), ", "),
                       fmt::join(shape, ", ")),
           "parameters must not be resized after wrapping, and be used in their module's forward "
           "only");
  }
}

bool FlatGradient::wants_average() const {
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (is_averaged(i)) return true;
  }
  return false;
}

TrainedSet FlatGradient::averaged() const {
  TrainedSet found;
  for (std::size_t i = 0; i < arrivals_.size(); ++i) found.add(is_averaged(i));
  return found;
}

void FlatGradient::reduce() {
  if (!wants_average() || pass_->stage != Stage::Gradients) return;
  begin_reduction();
  if (reduce_hook_) {
    reduce_hook_(store_->whole(), store_->average());
    return end_reduction();
  }
  const std::string label = averaged().label(spec_.call_label);
  pass_->work = store_->reduce(first_reduction(), second_reduction(), label);
  if (!pass_->work) pass_->stage = Stage::Averaged;
}

ReduceOptions FlatGradient::first_reduction() const {
  return divisor_ ? ReduceOptions{ReduceOp::Sum, 1.0 / *divisor_} : ReduceOptions{ReduceOp::Avg};
}

ReduceOptions FlatGradient::second_reduction() const {
  return {divisor_ ? ReduceOp::Sum : ReduceOp::Avg};
}

void FlatGradient::begin_reduction() {
  // Those of earlier passes stay what they are until the average is there.
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!accumulated_.waiting(i).defined()) continue;
    store_->add(accumulated_.waiting(i), i);
    arrivals_[i] = Arrival::Here;
  }
  store_->begin_reduction({averaged_flags(), /*notes_used=*/asks_for_used(), divisor_});
  pass_->stage = Stage::Reducing;
}

void FlatGradient::end_reduction() {
  store_->end_reduction();
  pass_->stage = Stage::Averaged;
}

std::vector<bool> FlatGradient::averaged_flags() const {
  std::vector<bool> flags(spec_.size());
  for (std::size_t i = 0; i < flags.size(); ++i) flags[i] = is_averaged(i);
  return flags;
}

std::size_t FlatGradient::num_bytes() const {
  return static_cast<std::size_t>(spec_.layout.blocks_numel()) *
         c10::elementSize(spec_.reduce_dtype);
}

void FlatGradient::collect() {
  if (!pass_ || !pass_->work) return;
  const WorkPtr work = std::move(pass_->work);
  store_->collect(*work, second_reduction(), averaged().label(spec_.call_label));
  end_reduction();
}

void FlatGradient::install() {
  if (!pass_) return;
  if (pass_->stage == Stage::Gradients) return end_pass_without_average();
  collect();
  const c10::NoGradGuard no_grad;
  if (asks_for_used()) leave_out_unused();
  store_->install(averaged_flags());
  pass_.reset();
  accumulated_.forget_aside();
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    const bool is_new = is_averaged(i);
    at::Tensor grad = std::exchange(accumulated_.kept(i), at::Tensor());
    accumulated_.clear_waiting(i);
    if (is_new) arrivals_[i] = Arrival::Installed;
    if (is_new || grad.defined()) spec_.parameters[i].tensor.mutable_grad() = std::move(grad);
  }
  store_->release();
}

void FlatGradient::begin_again() {
  // What autograd has just written.
  std::vector<at::Tensor> arrived;
  for (const auto& [name, tensor] : spec_.parameters) {
    arrived.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
  }
  install();
  begin_pass(/*averages=*/true);
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    spec_.parameters[i].tensor.mutable_grad() = std::move(arrived[i]);
  }
}

/// What has come waits.
void FlatGradient::end_pass_without_average() {
  pass_.reset();
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (arrivals_[i] == Arrival::Awaited) accumulated_.mark_missing(i);
    arrivals_[i] = Arrival::None;
  }
  accumulated_.give_back();
}

/// A hook gets gradients alone.
bool FlatGradient::asks_for_used() const {
  return zeroes_unused_ ? !*zeroes_unused_ : !reduce_hook_;
}

/// What no rank has used gets no gradient, or zeros where others have one.
void FlatGradient::leave_out_unused() {
  if (!zeroes_unused_) {
    if (store_->was_any_used()) return;
    arrivals_.assign(arrivals_.size(), Arrival::None);
    for (std::size_t i = 0; i < spec_.size(); ++i) accumulated_.clear_waiting(i);
    return;
  }
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (store_->was_used(i)) continue;
    arrivals_[i] = Arrival::None;
    accumulated_.clear_waiting(i);
  }
}

void FlatGradient::abandon() {
  if (!pass_) return;
  if (const WorkPtr work = std::exchange(pass_->work, nullptr)) {
    try {
      work->wait();
    } catch (const Error&) {
      work->order_stream();  // the group has failed: the next collective says so
    }
  }
  store_->abandon();
  pass_.reset();
  arrivals_.assign(arrivals_.size(), Arrival::None);
  accumulated_.clear_missing();
  accumulated_.give_back();
}

bool FlatGradient::take_installed(std::size_t index) {
  if (!is_installed(index)) return false;
  arrivals_[index] = Arrival::None;
  return true;
}

}  // namespace libddp
