#pragma once

// Where one parameter's gradient lives: a piece of a bucket, shown as a tensor of the parameter's
// shape and strides.
//
// Autograd hands over a gradient in a tensor of its own wherever `.grad` was None (the usual case:
// zero_grad sets it to None). `adopt` copies it into the bucket once and lets `.grad` be the view,
// which frees the other tensor at once. That moves fewer bytes than keeping `.grad` defined, which
// costs a memset and a read-add-write; and memory for gradients stays 1x. Where `.grad` is the view
// already, autograd has added in place and nothing is left to do. A script may give that tensor
// other memory (`p.grad.data = ...`): then it is a gradient like any other, and the next one is
// another tensor.
//
// NOTE [Gradients that are kept]
// A script may keep a gradient over zero_grad(set_to_none=True) and expects it to stay what it was.
// What `.grad` shows has a storage of its own, so its use count tells that somebody has it, or a
// view of it, when the next gradient comes: the storage then gets other memory with the same
// values, and the next `.grad` another storage. What looks at the memory without the storage
// (numpy; on a device what was launched on a stream that this copy does not wait for) sees the
// bucket, which lives as long as that storage.
//
// NOTE [Gradients that a script has given]
// A script may have `.grad` lie in memory of its own (pieces of a flat tensor, say), and look for
// the averages there. Such a one stays the tensor that it is (keep_given). Autograd's own tensors
// are told from it: nobody else has such a tensor, nor its memory, but for what came in.
//
// Where others average the parameter's gradient too (parameter_users.h), the script wants to keep
// gradients (keep_apart) or has given this one, or `.grad` has left the bucket (stay_apart), it
// stays apart: the bucket gets a copy, and `install` brings back what has become of it. Thread
// rule: one thread at a time (autograd runs a parameter's hook once per pass).
//
//   GradientSlot slot("head.weight", parameter, view_of_bucket);
//   slot.adopt();   // in the hook: parameter.grad() is now the view, with the same values

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <optional>
#include <string>

#include "libddp/ddp/parameter_users.h"

namespace libddp {

class GradientSlot {
 public:
  /// `where` begins the messages of errors.
  GradientSlot(std::string name, at::Tensor parameter, std::string where = "libddp");

  /// From now on the gradient lives in `view`, which must show bucket memory in the parameter's
  /// shape. A gradient that is defined moves there with its values.
  void move_to(at::Tensor view);
  /// From now on `.grad` is never the view.
  void keep_apart() { keeps_apart_ = true; }
  /// Whether `.grad` that a script has given or keeps stays the same tensor, from now on. If not,
  /// the next adopt() or move_to() brings it into the bucket.
  void keep_given(bool keeps) {
    keeps_given_ = keeps;
    if (!keeps) left_.reset();
  }
  bool keeps_given() const { return keeps_given_; }
  /// Autograd has accumulated `incoming` into `.grad`.
  void notice(const at::Tensor& incoming);
  /// Lets go of the bucket, unless `.grad` still needs the bytes. A `.grad` that somebody has is
  /// the same tensor in the next one.
  void leave_bucket();

  /// ENSURES: the bucket holds what autograd accumulated (zeros where it gave none), and `.grad` is
  /// the view unless it stays apart.
  /// Throws ArgumentError naming the parameter where the gradient is not what the bucket takes.
  void adopt() {
    at::Tensor& grad = parameter_.mutable_grad();
    if (is_apart()) return copy_to_bucket();
    if (!is_shown(grad)) replace(grad);
  }
  /// ENSURES: the bucket holds what autograd accumulated, and `.grad` is another tensor.
  void copy_to_bucket();
  /// Converts a gradient of the dtype that is welcome too.
  void take_dtype();
  /// For a parameter that got no gradient: the bucket holds `.grad`, or zeros where it is None.
  /// `.grad` stays None then.
  void fill_without_gradient();
  /// `.grad` becomes the view with whatever the bucket holds, or gets a copy of that where it stays
  /// apart or has a graph.
  void install();
  /// Whether `install` copies values into `.grad`, and does not just let it be the view.
  bool takes_values() const;
  /// The steps of `adopt`, for who copies many gradients at once (device_gradients.h).
  /// Throws as `adopt`.
  void check_gradient() const;
  /// `.grad` stays apart from now on, for as long as it is the tensor that it is.
  void stay_apart() { left_ = WeakTensor(parameter_.grad().getIntrusivePtr()); }
  /// `.grad` gets memory of its own with the same values, on the current stream, and stays apart.
  /// REQUIRES: it is the view.
  void leave_view();
  /// Before the bucket gets another gradient, on the current stream: see NOTE [Gradients that are
  /// kept].
  void leave_to_keepers();
  /// `.grad` is the view from now on unless it stays apart or has a graph.
  void show_bucket();
  /// Of the bucket's memory; no script has it.
  const at::Tensor& view() const { return view_; }

  /// Gradients of this dtype are welcome too; they are converted on the way into the bucket.
  void also_accept(at::ScalarType dtype) { also_accepted_ = dtype; }

  bool has_gradient() const { return parameter_.grad().defined(); }
  /// Whether `.grad` is the view, so that autograd adds to what stands there.
  bool shows_bucket() const { return is_in_bucket(parameter_.grad()); }
  /// Whether others average this gradient too.
  bool is_common() const { return user_.is_common(); }
  /// Whether `.grad` is a tensor of its own.
  bool is_apart() const { return keeps_apart_ || is_common() || has_left(); }
  ParameterUser& user() { return user_; }
  const ParameterUser& user() const { return user_; }
  const std::string& name() const { return name_; }
  const at::Tensor& parameter() const { return parameter_; }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  bool is_in_bucket(const at::Tensor& grad) const {
    return grad.defined() && grad.layout() == at::kStrided && grad.const_data_ptr() == data_ &&
           view_.defined() && grad.strides() == view_.strides();
  }
  /// Whether it is the tensor that `.grad` was made to be last, in the bucket still.
  bool is_shown(const at::Tensor& grad) const {
    return grad.unsafeGetTensorImpl() == last_shown_._unsafe_get_target() && is_in_bucket(grad);
  }
  /// Whether a script may look at `grad`, which is not in the bucket.
  bool is_given(const at::Tensor& grad, const at::Tensor& incoming) const;
  /// Whether somebody else has `.grad`, which is shown.
  bool is_shown_kept(const at::Tensor& grad) const;
  bool has_left() const {
    const at::Tensor& grad = parameter_.grad();
    return grad.defined() && grad.unsafeGetTensorImpl() == left_._unsafe_get_target();
  }
  /// What `.grad` is to be.
  at::Tensor show();
  /// Whoever has what was shown keeps its values.
  void give_away_shown();
  void replace(at::Tensor& grad);
  void clear();
  void check(const at::Tensor& grad) const;
  void copy_in(const at::Tensor& grad);

  std::string name_;
  std::string where_;
  at::Tensor parameter_;
  ParameterUser user_;
  at::Tensor view_;
  /// The same as the script has it. No view in autograd's sense: `detach_()` would refuse.
  WeakTensor last_shown_ = WeakTensor(at::Tensor().getIntrusivePtr());
  /// See stay_apart.
  WeakTensor left_ = WeakTensor(at::Tensor().getIntrusivePtr());
  /// The tensor that is shown, for the next pass too, unless others had it when a gradient came
  /// (is_shared_): then they alone have it, as a tensor that Python has once seen is in use for as
  /// long as it is held here.
  at::Tensor shown_;
  bool is_shared_ = false;
  /// Of what is shown: share_memory_() gives a storage other memory too.
  c10::Storage storage_;
  void* data_ = nullptr;
  bool keeps_apart_ = false;
  bool keeps_given_ = false;
  std::size_t bytes_ = 0;
  std::optional<at::ScalarType> also_accepted_;
};

}  // namespace libddp
