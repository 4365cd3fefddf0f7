#include "libddp/ddp/gradient_slot.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <memory>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// From this size on torch's copy, which may use several threads, beats its own dispatch cost.
constexpr std::size_t kDispatchedCopyBytes = std::size_t{256} << 10;

/// Memory of a storage, and the one that it had before, at which somebody may look still.
struct Kept {
  at::Tensor memory;
  at::DataPtr former;
};

at::DataPtr memory_of(at::Tensor memory, at::DataPtr former = {}) {
  void* const data = memory.data_ptr();
  const c10::Device device = memory.device();
  auto kept = std::make_unique<Kept>(Kept{std::move(memory), std::move(former)});
  return {data, kept.release(), [](void* of) { delete static_cast<Kept*>(of); }, device};
}

void exchange_memory(const c10::Storage& storage, at::Tensor memory) {
  at::DataPtr former = storage.set_data_ptr({nullptr, memory.device()});
  storage.set_data_ptr_noswap(memory_of(std::move(memory), std::move(former)));
}

}  // namespace

GradientSlot::GradientSlot(std::string name, at::Tensor parameter, std::string where)
    : name_(std::move(name)),
      where_(std::move(where)),
      parameter_(std::move(parameter)),
      user_(parameter_) {}

void GradientSlot::move_to(at::Tensor view) {
  const bool has_followed = storage_ && !view_.defined();  // see leave_bucket
  if (!has_followed) leave_bucket();
  view_ = std::move(view);
  data_ = view_.data_ptr();
  bytes_ = view_.nbytes();
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) return;
  if (has_followed && grad.scalar_type() == view_.scalar_type()) {
    const c10::NoGradGuard no_grad;
    view_.copy_(grad);
    exchange_memory(storage_, view_);
    return;
  }
  if (!is_apart()) replace(grad);
}

void GradientSlot::notice(const at::Tensor& incoming) {
  if (!keeps_given_) return;
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined() || is_in_bucket(grad)) return;
  if (is_given(grad, incoming)) stay_apart();
}

bool GradientSlot::is_given(const at::Tensor& grad, const at::Tensor& incoming) const {
  if (grad.layout() != at::kStrided || !grad.has_storage()) return false;
  // What was shown has got other memory from the script.
  if (grad.unsafeGetTensorImpl() == last_shown_._unsafe_get_target()) return true;
  if (grad.use_count() > 1) return true;
  const bool is_taken_over = incoming.has_storage() && grad.is_alias_of(incoming);
  return !is_taken_over && grad.storage().use_count() > 1;
}

bool GradientSlot::is_shown_kept(const at::Tensor& grad) const {
  if (bytes_ == 0 || !storage_ || !grad.storage().is_alias_of(storage_)) return false;
  const bool is_ours_too = shown_.is_same(grad);
  return grad.use_count() > (is_ours_too ? 2 : 1) || storage_.use_count() > 2;
}

void GradientSlot::leave_bucket() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (view_.defined() && is_apart() && shows_bucket()) grad = view_.clone();
  notice(at::Tensor());
  if (!keeps_given_ || !is_shown(grad) || !is_shown_kept(grad)) {
    shown_ = at::Tensor();
    storage_ = c10::Storage();
    last_shown_.reset();
  }
  view_ = at::Tensor();
  data_ = nullptr;
}

void GradientSlot::fill_without_gradient() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) {
    clear();
  } else {
    adopt();
  }
}

bool GradientSlot::takes_values() const {
  const at::Tensor& grad = parameter_.grad();
  return grad.defined() && (is_apart() || grad.requires_grad()) && !shows_bucket();
}

void GradientSlot::install() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!is_apart() && !(grad.defined() && grad.requires_grad())) {
    grad = show();
  } else if (!takes_values()) {
    grad = view_.clone();
  } else {
    const c10::NoGradGuard no_grad;
    grad.copy_(view_);
  }
}

void GradientSlot::check_gradient() const {
  if (has_gradient()) check(parameter_.grad());
}

void GradientSlot::leave_view() {
  give_away_shown();
  at::Tensor& grad = parameter_.mutable_grad();
  if (shows_bucket()) grad = view_.clone();
  stay_apart();
}

void GradientSlot::show_bucket() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!is_apart() && !(grad.defined() && grad.requires_grad())) grad = show();
}

at::Tensor GradientSlot::show() {
  if (shown_.defined() && shown_.const_data_ptr() == data_) return shown_;
  if (!storage_ || storage_.data() != data_) {
    storage_ = c10::Storage(c10::Storage::use_byte_size_t(), bytes_, memory_of(view_));
  }
  at::Tensor made = view_.variable_data();
  made.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_);
  made.unsafeGetTensorImpl()->set_storage_offset(0);
  last_shown_ = WeakTensor(made.getIntrusivePtr());
  shown_ = is_shared_ ? at::Tensor() : made;
  return made;
}

void GradientSlot::leave_to_keepers() {
  if (!storage_) return;
  if (shown_.use_count() > 1) {
    is_shared_ = true;
    shown_ = at::Tensor();
  }
  const std::size_t num_own = shown_.defined() && shown_.storage().is_alias_of(storage_) ? 2 : 1;
  if (storage_.use_count() > num_own) give_away_shown();
}

void GradientSlot::give_away_shown() {
  if (bytes_ > 0 && storage_ && storage_.data() == data_) {
    const c10::NoGradGuard no_grad;
    at::Tensor memory = at::empty_strided(view_.sizes(), view_.strides(), view_.options());
    memory.copy_(view_);
    exchange_memory(storage_, std::move(memory));
  }
  shown_ = at::Tensor();
  storage_ = c10::Storage();
}

// Plain memory where it may be: a dispatch costs more than the bytes of most parameters.
void GradientSlot::clear() {
  leave_to_keepers();
  if (view_.is_cpu()) {
    std::memset(data_, 0, bytes_);
  } else {
    view_.zero_();
  }
}

void GradientSlot::replace(at::Tensor& grad) {
  if (!grad.defined()) {
    clear();
  } else {
    check(grad);
    // `p.grad = p.grad.detach()` is another tensor over the same bytes.
    if (bytes_ > 0 && !is_in_bucket(grad)) copy_in(grad);
  }
  grad = show();
}

void GradientSlot::take_dtype() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined() || grad.scalar_type() == view_.scalar_type()) return;
  if (grad.scalar_type() == also_accepted_) grad = grad.to(view_.scalar_type());
}

void GradientSlot::copy_to_bucket() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (!grad.defined()) return clear();
  check(grad);
  if (shows_bucket()) return leave_view();
  take_dtype();
  if (bytes_ > 0) copy_in(grad);
}

void GradientSlot::check(const at::Tensor& grad) const {
  const bool strided = grad.layout() == at::kStrided;
  const bool has_dtype =
      grad.scalar_type() == view_.scalar_type() || grad.scalar_type() == also_accepted_;
  if (strided && has_dtype && grad.sizes() == view_.sizes() && grad.device() == view_.device()) {
    return;
  }
  const auto describe = [](const at::Tensor& t) {
    return t.layout() == at::kStrided ? fmt::format("{} [{}] on {}", c10::toString(t.scalar_type()),
                                                    fmt::join(t.sizes(), ", "), t.device().str())
                                      : std::string("a sparse tensor");
  };
  throw ArgumentError(fmt::format(
      "{}: parameter '{}': its gradient is {}, but its bucket holds {}. Hint: {}.", where_, name_,
      describe(grad), describe(view_),
      strided ? "wrap the model after changing its dtype, device or shapes, and leave the "
                "parameter's grad_dtype unset"
              : "parameters with sparse gradients must be known when the model is "
                "wrapped: those of torch.nn.Embedding and EmbeddingBag with sparse=True "
                "are (in C++ also those in options.sparse_parameters); use sparse=False "
                "elsewhere"));
}

void GradientSlot::copy_in(const at::Tensor& grad) {
  leave_to_keepers();  // a gradient that lies in the bucket otherwise is one of those
  if (bytes_ < kDispatchedCopyBytes && grad.is_cpu() && grad.strides() == view_.strides() &&
      grad.scalar_type() == view_.scalar_type() && grad.is_non_overlapping_and_dense()) {
    std::memcpy(data_, grad.const_data_ptr(), bytes_);
    return;
  }
  const c10::NoGradGuard no_grad;
  view_.copy_(grad);
}

}  // namespace libddp
