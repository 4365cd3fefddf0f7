// The gradients of a FlatParameter: from autograd's tensors to averaged pieces.

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

void FlatParameter::put_gradients_aside() {
  if (has_hidden_ || !is_trained_) return;
  has_hidden_ = true;
  for (std::size_t i = 0; i < size(); ++i) {
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    hidden_[i] = std::exchange(grad, at::Tensor());
  }
}

void FlatParameter::give_gradients_back() {
  if (!has_hidden_) return;
  has_hidden_ = false;
  for (std::size_t i = 0; i < size(); ++i) {
    parameters_[i].tensor.mutable_grad() = std::exchange(hidden_[i], at::Tensor());
  }
}

void FlatParameter::release_gradients() {
  if (!gradient_block_.defined() || !is_sharded() || has_hidden_ || shows_copies_) return;
  for (const auto& [name, tensor] : parameters_) {
    if (tensor.grad().defined()) return;
  }
  forget_gradients();
}

void FlatParameter::forget_gradients() {
  gradient_pieces_.clear();
  gradient_block_ = at::Tensor();
}

void FlatParameter::hide_gradients() {
  if (hides_gradients_ || !is_trained_) return;
  hides_gradients_ = true;
  std::fill(fired_.begin(), fired_.end(), 0);
  num_fired_ = 0;
  put_gradients_aside();
  for (std::size_t i = 0; i < size(); ++i) keeps_[i] = hidden_[i].defined();
}

bool FlatParameter::take_gradient(std::size_t index) {
  at::Tensor& grad = parameters_[index].tensor.mutable_grad();
  if (!grad.defined()) return false;
  check(grad, index);
  begin_array();
  copy_in(grad, index);
  grad = at::Tensor();
  filled_[index] = 1;
  if (fired_[index]) return false;
  fired_[index] = 1;
  return ++num_fired_ == size();
}

void FlatParameter::check(const at::Tensor& grad, std::size_t index) const {
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw StateError(fmt::format("libddp {}: the gradient of parameter '{}' {}. Hint: {}.", label_,
                                 parameters_[index].name, what, hint));
  };
  if (reduced_.defined()) {
    refuse("came again after it had been averaged",
           "a parameter that several nested backward passes use must not be in a sharded unit of "
           "its own; wrap the module that owns all of its uses");
  }
  if (grad.layout() != at::kStrided) {
    refuse("is sparse", "use sparse=False in the embedding");
  }
  if (grad.sizes() != full_[index].sizes()) {
    refuse(fmt::format("has the shape [{}], but the parameter [{}]", fmt::join(grad.sizes(), ", "),
                       fmt::join(full_[index].sizes(), ", ")),
           "parameters must not be resized after wrapping, and be used in their module's forward "
           "only");
  }
}

void FlatParameter::begin_array() {
  if (gradients_.defined()) return;
  if (!is_sharded() && reduce_dtype_ == gradient_dtype_ && !keeps_any()) {
    begin_block(/*is_overwritten=*/false);
    gradients_ = gradient_block_;
  } else {
    gradients_ = pool_->take(layout_.numel(), reduce_dtype_);
  }
  std::fill(filled_.begin(), filled_.end(), 0);
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
  const bool is_plain = grad.scalar_type() == reduce_dtype_ && grad.is_contiguous();
  if (is_plain && !filled_[index]) {
    auto* const array = static_cast<std::byte*>(gradients_.mutable_data_ptr());
    const auto offset = static_cast<std::size_t>(layout_.offset(index));
    std::memcpy(array + offset * grad.element_size(), grad.const_data_ptr(), grad.nbytes());
    return;
  }
  const c10::NoGradGuard no_grad;
  const at::Tensor place = gradients_.narrow(0, layout_.offset(index), layout_.numel_of(index));
  if (filled_[index]) {
    place.add_(grad.reshape(-1));
  } else {
    place.view(grad.sizes()).copy_(grad);
  }
}

/// Zeros where no gradient came, and between the parameters: they count in norms and sums.
void FlatParameter::fill_missing() {
  auto* const bytes = static_cast<std::byte*>(gradients_.data_ptr());
  const std::size_t element = gradients_.element_size();
  std::int64_t end = 0;
  const auto clear = [&](std::int64_t from, std::int64_t to) {
    const auto at = static_cast<std::size_t>(from) * element;
    if (to > from) std::memset(bytes + at, 0, static_cast<std::size_t>(to) * element - at);
  };
  for (std::size_t i = 0; i < size(); ++i) {
    clear(end, layout_.offset(i));
    end = layout_.offset(i) + layout_.numel_of(i);
    if (!filled_[i]) clear(layout_.offset(i), end);
  }
  clear(end, layout_.numel());
}

void FlatParameter::reduce() {
  if (!is_trained_ || reduced_.defined()) return;
  begin_reduction();
  const CallOptions async{.async = true, .label = label_};
  if (is_sharded()) {
    work_ = options_.shard->reduce_scatter_into(reduced_, gradients_, {ReduceOp::Avg}, async);
  } else if (options_.replicate) {
    work_ = options_.replicate->all_reduce(reduced_, {ReduceOp::Avg}, async);
  }
}

void FlatParameter::begin_reduction() {
  begin_array();
  fill_missing();
  if (!is_sharded()) {
    reduced_ = gradients_;
    return;
  }
  const bool may_overwrite = reduce_dtype_ == gradient_dtype_ && !keeps_any();
  begin_block(may_overwrite);
  reduced_ = may_overwrite ? gradient_block_ : at::empty({layout_.block_numel()}, reduce_dtype_);
}

void FlatParameter::end_reduction() {
  if (is_sharded()) end_array();
}

std::size_t FlatParameter::gradient_bytes() const {
  return static_cast<std::size_t>(layout_.numel()) * c10::elementSize(reduce_dtype_);
}

bool FlatParameter::keeps_any() const {
  return std::any_of(keeps_.begin(), keeps_.end(), [](auto keep) { return keep; });
}

void FlatParameter::collect() {
  if (!work_) return;
  const WorkPtr work = std::move(work_);
  work->wait();
  if (!is_sharded()) return;
  end_array();
  if (options_.replicate) {
    options_.replicate->all_reduce(reduced_, {ReduceOp::Avg}, {.label = label_});
  }
}

void FlatParameter::install() {
  if (!hides_gradients_) return;
  hides_gradients_ = false;
  if (!reduced_.defined()) return give_gradients_back();  // a pass that does not synchronise
  collect();
  const c10::NoGradGuard no_grad;
  add_to_block(std::exchange(reduced_, at::Tensor()));
  if (gradient_pieces_.empty()) make_gradient_pieces();
  has_hidden_ = false;
  for (std::size_t i = 0; i < size(); ++i) {
    hidden_[i] = at::Tensor();
    const at::Tensor& parameter = parameters_[i].tensor;
    parameter.mutable_grad() = parameter.requires_grad() ? gradient_pieces_[i] : at::Tensor();
  }
}

/// Not views in autograd's sense: LibTorch's optimizers detach gradients in place, which views
/// refuse. Made in each step, so without the dispatcher.
void FlatParameter::make_gradient_pieces() {
  for (std::size_t i = 0; i < size(); ++i) {
    at::Tensor piece = gradient_block_.variable_data();
    piece.unsafeGetTensorImpl()->set_sizes_and_strides(pieces_[i].sizes(), pieces_[i].strides(),
                                                       layout_.piece_offset(i, rank()));
    gradient_pieces_.push_back(std::move(piece));
  }
}

void FlatParameter::add_to_block(const at::Tensor& result) {
  begin_block(/*is_overwritten=*/false);
  const bool is_there = result.is_same(gradient_block_);
  if (!is_there || keeps_any()) add_kept(result, is_there);
  if (!is_sharded()) end_array();
}

void FlatParameter::add_kept(const at::Tensor& result, bool is_there) {
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor mine = piece_of(gradient_block_, i);
    // Somebody may have put another tensor there.
    const bool is_ours = keeps_[i] && hidden_[i].const_data_ptr() == mine.const_data_ptr();
    if (is_there) {
      if (keeps_[i] && !is_ours) mine.add_(hidden_[i]);
      continue;
    }
    if (keeps_[i] && !is_ours) mine.copy_(hidden_[i]);
    if (!keeps_[i]) mine.zero_();
  }
  if (!is_there) gradient_block_.add_(result);
}

void FlatParameter::abandon() {
  if (work_) {
    try {
      std::exchange(work_, nullptr)->wait();
    } catch (const Error&) {
      // The group has failed: the next collective says so.
    }
  }
  end_array();
  reduced_ = at::Tensor();
  if (hides_gradients_ && is_sharded() && !keeps_any()) forget_gradients();  // half written
  hides_gradients_ = false;
  give_gradients_back();
}

}  // namespace libddp
