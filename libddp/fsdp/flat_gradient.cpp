// The gradients of a FlatParameter: from autograd's tensors to averaged shards.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/flat_parameter.h"

namespace libddp {
namespace {

/// Whether its bytes are its values, one behind the other.
bool is_plain(const at::Tensor& grad) {
  const c10::TensorImpl& impl = *grad.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.is_python_dispatch() && !grad._is_zerotensor() &&
         !grad.is_conj() && !grad.is_neg() && grad.is_contiguous();
}

/// Whether they are the same elements in the same order.
bool shows_same(const at::Tensor& left, const at::Tensor& right) {
  return left.layout() == at::kStrided && left.const_data_ptr() == right.const_data_ptr() &&
         left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         left.strides() == right.strides();
}

/// All of the memory that `part` shows some of, if it has this many elements; else undefined.
at::Tensor whole_storage(const at::Tensor& part, std::int64_t numel, at::ScalarType dtype) {
  if (!part.defined() || part.scalar_type() != dtype || !is_plain(part)) return {};
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  if (part.storage().nbytes() != bytes) return {};
  at::Tensor whole = part.variable_data();
  const std::int64_t stride = 1;
  whole.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(numel),
                                                     at::IntArrayRef(stride), 0);
  return whole;
}

}  // namespace

void FlatParameter::begin_pass(bool averages) {
  if (pass_) return;
  pass_.emplace();
  pass_->averages = averages;
  put_gradients_aside();
  const bool adds_to_kept = !averages && !is_sharded() && shows_waiting_;
  for (std::size_t i = 0; i < size(); ++i) {
    Member& member = members_[i];
    if (parameters_[i].tensor.requires_grad()) {
      member.gradient = Gradient::Awaited;
      ++pass_->num_awaited;
      if (adds_to_kept && member.aside.defined() && !member.waiting.defined()) {
        member.waiting = std::exchange(member.aside, at::Tensor());
      }
    } else if (member.gradient != Gradient::Absent && member.gradient != Gradient::Waiting) {
      member.gradient = Gradient::None;
    }
  }
  pass_->trains_all = pass_->num_awaited == size();
}

bool FlatParameter::accumulate_gradient(std::size_t index) {
  at::Tensor& grad = parameters_[index].tensor.mutable_grad();
  if (!grad.defined()) return false;
  check(grad, index);
  if (pass_->averages) {
    begin_array();
    copy_in(grad, index);
  } else {
    add_to_waiting(grad, index);
  }
  grad = at::Tensor();
  const Gradient now = pass_->averages ? Gradient::Here : Gradient::Waiting;
  const Gradient before = std::exchange(members_[index].gradient, now);
  return before == Gradient::Awaited && --pass_->num_awaited == 0;
}

/// In place, as autograd does it; in the dtype that it comes in where scripts see it, as in torch's
/// FSDP1, else in that of the average, as in its fully_shard.
void FlatParameter::add_to_waiting(const at::Tensor& grad, std::size_t index) {
  const c10::NoGradGuard no_grad;
  at::Tensor& waiting = members_[index].waiting;
  if (!waiting.defined()) {
    const at::ScalarType dtype = shows_waiting_ ? grad.scalar_type() : reduce_dtype_;
    const bool fits = is_plain(grad) && grad.scalar_type() == dtype;
    waiting =
        fits ? grad.detach() : at::empty(grad.sizes(), grad.options().dtype(dtype)).copy_(grad);
  } else if (waiting.is_non_overlapping_and_dense()) {
    waiting.add_(grad);
  } else {
    waiting = waiting.clone(at::MemoryFormat::Contiguous).add_(grad);
  }
}

bool FlatParameter::is_filled(std::size_t index) const {
  return members_[index].gradient == Gradient::Here;
}

bool FlatParameter::wants_average() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.gradient != Gradient::None; });
}

void FlatParameter::check(const at::Tensor& grad, std::size_t index) const {
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw StateError(fmt::format("libddp {}: the gradient of parameter '{}' {}. Hint: {}.", label_,
                                 parameters_[index].name, what, hint));
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
  if (grad.sizes() != members_[index].full.sizes()) {
    refuse(fmt::format("has the shape [{}], but the parameter [{}]", fmt::join(grad.sizes(), ", "),
                       fmt::join(members_[index].full.sizes(), ", ")),
           "parameters must not be resized after wrapping, and be used in their module's forward "
           "only");
  }
}

void FlatParameter::begin_array() {
  if (gradients_.defined()) return;
  if (!is_sharded() && reduce_dtype_ == gradient_dtype_ && !keeps_any() && !is_block_waiting()) {
    begin_block(/*is_overwritten=*/false);
    gradients_ = gradient_block_;
  } else {
    gradients_ = pool_->take(layout_.blocks_numel(), reduce_dtype_);
  }
}

void FlatParameter::begin_block(bool is_overwritten) {
  if (gradient_block_.defined()) return;
  const std::int64_t numel = layout_.block_numel();
  if (is_overwritten) {
    gradient_block_ = at::empty({numel}, gradient_dtype_);
    return;
  }
  const bool is_reduced = !is_sharded() && options_.replicate;
  gradient_block_ = is_reduced ? options_.replicate->allocate({numel}, gradient_dtype_).zero_()
                               : at::zeros({numel}, gradient_dtype_);
}

void FlatParameter::end_array() {
  const bool is_ours = gradients_.defined() && !gradients_.is_same(gradient_block_);
  if (is_ours) pool_->give(gradients_);
  gradients_ = at::Tensor();
}

void FlatParameter::copy_in(const at::Tensor& grad, std::size_t index) {
  if (!is_filled(index) && grad.scalar_type() == reduce_dtype_ && is_plain(grad)) {
    copy_bytes_in(grad, index);
    return;
  }
  const c10::NoGradGuard no_grad;
  const at::Tensor elements = grad.reshape(-1);
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    const FlatLayout::ShardSpec shard = layout_.shard(index, rank);
    const at::Tensor from = elements.narrow(0, shard.begin, shard.numel());
    const at::Tensor place = shard_in(gradients_, index, rank);
    is_filled(index) ? place.add_(from) : place.copy_(from);
  }
}

void FlatParameter::copy_bytes_in(const at::Tensor& grad, std::size_t index) {
  const std::size_t element = grad.element_size();
  const auto* const from = static_cast<const std::byte*>(grad.const_data_ptr());
  auto* const array = static_cast<std::byte*>(gradients_.mutable_data_ptr());
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    const FlatLayout::ShardSpec shard = layout_.shard(index, rank);
    std::memcpy(array + static_cast<std::size_t>(layout_.shard_offset(index, rank)) * element,
                from + static_cast<std::size_t>(shard.begin) * element,
                static_cast<std::size_t>(shard.numel()) * element);
  }
}

/// Zeros where no gradient came, and between the shards: they count in norms and sums.
void FlatParameter::fill_missing() {
  auto* const bytes = static_cast<std::byte*>(gradients_.data_ptr());
  const std::size_t element = gradients_.element_size();
  std::int64_t end = 0;
  const auto clear_until = [&](std::int64_t to) {
    if (to <= end) return;
    std::memset(bytes + static_cast<std::size_t>(end) * element, 0,
                static_cast<std::size_t>(to - end) * element);
  };
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    for (std::size_t i = 0; i < size(); ++i) {
      if (!is_filled(i)) continue;
      clear_until(layout_.shard_offset(i, rank));
      end = layout_.shard_offset(i, rank) + layout_.shard(i, rank).numel();
    }
  }
  clear_until(layout_.blocks_numel());
  if (!zeroes_unused_) note_used();
}

/// So that the average tells whether any rank has used a parameter: zero bytes, or not.
void FlatParameter::note_used() {
  const std::size_t element = gradients_.element_size();
  auto* const bytes = static_cast<std::byte*>(gradients_.mutable_data_ptr());
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    const std::int64_t begin = layout_.block_numel() * rank + layout_.notes_offset();
    for (std::size_t i = 0; i < size(); ++i) {
      std::byte* const note = bytes + (static_cast<std::size_t>(begin) + i) * element;
      if (is_filled(i)) std::memcpy(note, one_.const_data_ptr(), element);
    }
  }
}

/// What no rank has used gets no gradient.
void FlatParameter::leave_out_unused(const at::Tensor& result) {
  const std::size_t element = result.element_size();
  auto* const notes = static_cast<std::byte*>(result.mutable_data_ptr()) +
                      static_cast<std::size_t>(layout_.notes_offset()) * element;
  for (std::size_t i = 0; i < size(); ++i) {
    std::byte* const note = notes + i * element;
    const bool is_zero =
        std::all_of(note, note + element, [](std::byte byte) { return byte == std::byte{}; });
    if (is_zero) members_[i].gradient = Gradient::None;
    std::memset(note, 0, element);
  }
}

void FlatParameter::reduce() {
  if (!wants_average() || pass_->stage != Stage::Gradients) return;
  begin_reduction();
  if (reduce_hook_) {
    reduce_hook_(gradients_, pass_->average);
    return end_reduction();
  }
  const std::string label = averaged().label(call_label_);
  const CallOptions async{.async = true, .label = label};
  if (is_sharded()) {
    pass_->work =
        options_.shard->reduce_scatter_into(pass_->average, gradients_, first_reduction(), async);
  } else if (options_.replicate) {
    pass_->work = options_.replicate->all_reduce(pass_->average, first_reduction(), async);
  } else {
    pass_->stage = Stage::Averaged;
  }
}

ReduceOptions FlatParameter::first_reduction() const {
  return divisor_ ? ReduceOptions{ReduceOp::Sum, 1.0 / *divisor_} : ReduceOptions{ReduceOp::Avg};
}

ReduceOptions FlatParameter::second_reduction() const {
  return {divisor_ ? ReduceOp::Sum : ReduceOp::Avg};
}

TrainedSet FlatParameter::averaged() const {
  TrainedSet found;
  for (const Member& member : members_) found.add(member.gradient != Gradient::None);
  return found;
}

void FlatParameter::begin_reduction() {
  begin_array();
  fill_in_waiting();
  fill_missing();
  pass_->stage = Stage::Reducing;
  if (!is_sharded()) {
    if (divisor_ && !options_.replicate) gradients_.div_(*divisor_);
    pass_->average = gradients_;
    return;
  }
  const bool may_overwrite = reduce_dtype_ == gradient_dtype_ && !keeps_any();
  if (!keeps_any()) begin_block(may_overwrite);
  pass_->average =
      may_overwrite ? gradient_block_ : at::empty({layout_.block_numel()}, reduce_dtype_);
}

void FlatParameter::end_reduction() {
  if (is_sharded()) end_array();
  pass_->stage = Stage::Averaged;
}

std::size_t FlatParameter::gradient_bytes() const {
  return static_cast<std::size_t>(layout_.blocks_numel()) * c10::elementSize(reduce_dtype_);
}

bool FlatParameter::keeps_any() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.aside.defined(); });
}

void FlatParameter::collect() {
  if (!pass_ || !pass_->work) return;
  const WorkPtr work = std::move(pass_->work);
  work->wait();
  if (is_sharded() && options_.replicate) {
    const std::string label = averaged().label(call_label_);
    options_.replicate->all_reduce(pass_->average, second_reduction(), {.label = label});
  }
  end_reduction();
}

void FlatParameter::install() {
  if (!pass_) return;
  if (pass_->stage == Stage::Gradients) return end_pass_without_average();
  collect();
  const c10::NoGradGuard no_grad;
  const at::Tensor result = std::exchange(pass_->average, at::Tensor());
  if (!zeroes_unused_) leave_out_unused(result);
  keeps_any() ? add_to_kept(result) : move_to_block(result);
  if (!is_sharded()) end_array();
  pass_.reset();
  if (late_hooks_) late_hooks_->put_all_back();
  gradients_are_aside_ = false;
  for (std::size_t i = 0; i < size(); ++i) {
    Member& member = members_[i];
    at::Tensor grad = std::exchange(member.aside, at::Tensor());
    member.waiting = at::Tensor();
    const bool is_new = member.gradient != Gradient::None;
    if (is_new) member.gradient = Gradient::Installed;
    if (is_new || grad.defined()) parameters_[i].tensor.mutable_grad() = std::move(grad);
  }
  if (is_sharded()) gradient_block_ = at::Tensor();  // `.grad` alone has it from now on
}

void FlatParameter::begin_again() {
  // What autograd has just written.
  std::vector<at::Tensor> arrived;
  for (const auto& [name, tensor] : parameters_) {
    arrived.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
  }
  install();
  begin_pass(/*averages=*/true);
  for (std::size_t i = 0; i < size(); ++i) {
    parameters_[i].tensor.mutable_grad() = std::move(arrived[i]);
  }
}

/// What has come waits.
void FlatParameter::end_pass_without_average() {
  pass_.reset();
  if (late_hooks_) late_hooks_->put_all_back();
  for (Member& member : members_) {
    if (member.gradient != Gradient::Awaited) continue;
    member.gradient = member.waiting.defined() ? Gradient::Waiting : Gradient::Absent;
  }
  give_gradients_back();
}

/// Into `aside`, the shards of a block that has the result; nothing stood there.
void FlatParameter::move_to_block(const at::Tensor& result) {
  begin_block(/*is_overwritten=*/true);
  if (!result.is_same(gradient_block_)) gradient_block_.copy_(result);
  for (std::size_t i = 0; i < size(); ++i) {
    if (members_[i].gradient == Gradient::None) continue;
    members_[i].aside = make_gradient_shard(i);
  }
  gradient_storage_.emplace(gradient_block_.storage().getWeakStorageImpl());
}

/// Not a view in autograd's sense: LibTorch's optimizers detach gradients in place, which views
/// refuse. Made in each step, so without the dispatcher.
at::Tensor FlatParameter::make_gradient_shard(std::size_t index) const {
  const at::Tensor& shard = members_[index].shard;
  at::Tensor made = gradient_block_.variable_data();
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shard.sizes(), shard.strides(),
                                                    layout_.shard_offset(index));
  return made;
}

/// As autograd does: in place, whoever's tensor it is. Where `.grad` was None the new gradient has
/// memory of its own, since somebody may have kept the one that stood there.
void FlatParameter::add_to_kept(const at::Tensor& result) {
  at::Tensor block = gradient_block_;
  if (!block.defined())
    block = whole_storage(members_[0].aside, layout_.block_numel(), gradient_dtype_);
  for (std::size_t i = 0; block.defined() && i < size(); ++i) {
    const Member& member = members_[i];
    const bool is_in = member.gradient != Gradient::None && member.aside.defined() &&
                       shows_same(member.aside, shard_of(block, i));
    if (!is_in) block = at::Tensor();
  }
  if (block.defined()) {
    block.add_(result);
    return;
  }
  for (std::size_t i = 0; i < size(); ++i) {
    if (members_[i].gradient == Gradient::None) continue;
    const at::Tensor mine = shard_of(result, i);
    at::Tensor& grad = members_[i].aside;
    if (!grad.defined()) {
      grad = mine.to(gradient_dtype_, /*non_blocking=*/false, /*copy=*/true);
    } else if (grad.is_non_overlapping_and_dense()) {
      grad.add_(mine);
    } else {
      grad = grad.clone(at::MemoryFormat::Contiguous).add_(mine);  // several elements may be one
    }
  }
}

void FlatParameter::abandon() {
  if (late_hooks_) late_hooks_->put_all_back();
  if (!pass_) return;
  if (pass_->work) {
    try {
      std::exchange(pass_->work, nullptr)->wait();
    } catch (const Error&) {
      // The group has failed: the next collective says so.
    }
  }
  end_array();
  if (is_sharded()) gradient_block_ = at::Tensor();  // half written
  pass_.reset();
  for (Member& member : members_) {
    member.gradient = member.waiting.defined() ? Gradient::Waiting : Gradient::None;
  }
  give_gradients_back();
}

bool FlatParameter::has_late_hooks() const {
  if (!late_hooks_) return false;
  for (std::size_t i = 0; i < size(); ++i) {
    if (late_hooks_->has(i)) return true;
  }
  return false;
}

void FlatParameter::run_late_hooks() {
  if (!late_hooks_) return;
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < size(); ++i) {
    Gradient& gradient = members_[i].gradient;
    if (gradient != Gradient::Installed) continue;
    gradient = Gradient::None;
    if (!late_hooks_->has(i)) continue;
    late_hooks_->run(i);
  }
}

}  // namespace libddp
