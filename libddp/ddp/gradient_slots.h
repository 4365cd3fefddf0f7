#pragma once

// The gradients of all parameters of a Reducer: where each lives (gradient_slot.h), and what its
// `.grad` holds.
//
//   Settled --a gradient fires--> Own --the bucket gets a copy--> Copied
//      ^                           |                                |
//      '------ the pass has averaged all (settle) -----------------'
//      '-----> AveragedInPart where averages are sharded (sharded_averages.h)
//
// Thread rule: as Reducer.
//
//   GradientSlots slots(parameters, "libddp[group world, rank 0/2] backward", true);
//   slots.take(index, in_pass, false);  // in the gradient's hook
//   slots.collect(members, num_fired);  // before their bucket is sent
//   slots.install_copies();             // at the end of the pass
//   slots.settle();

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "libddp/ddp/device_gradients.h"
#include "libddp/ddp/gradient_slot.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class GradientSlots {
 public:
  /// `where` begins the messages of errors. `as_bucket_view`: see
  /// ReducerOptions::gradient_as_bucket_view.
  GradientSlots(const NamedTensors& parameters, std::string where,
                std::optional<bool> as_bucket_view);

  std::size_t size() const { return slots_.size(); }
  GradientSlot& operator[](std::size_t index) { return slots_[index]; }
  const GradientSlot& operator[](std::size_t index) const { return slots_[index]; }
  auto begin() { return slots_.begin(); }
  auto end() { return slots_.end(); }
  auto begin() const { return slots_.begin(); }
  auto end() const { return slots_.end(); }

  /// Autograd has accumulated a gradient, or come to the parameter without one (a Function whose
  /// backward gives None). ENSURES in a pass: the bucket has it, or zeros, on a device from
  /// `collect` on. With `keeps_none`, or outside of a pass, `.grad` stays None without one.
  void take(std::size_t index, bool in_pass, bool keeps_none);
  /// The same of one that has no bucket.
  void take_without_bucket(std::size_t index, bool keeps_none);
  /// Whether `take` was called last for a parameter that stays without a gradient.
  bool has_got_none(std::size_t index) const { return states_[index] == State::None; }
  /// ENSURES: the bucket of these has all gradients that have fired in this pass, and `.grad`, or
  /// zeros, of the others. `num_fired`: by parameter.
  void collect(const std::vector<std::size_t>& members,
               const std::vector<std::uint32_t>& num_fired);
  /// The current stream has moved gradients into other buckets (GradientSlot::move_to), or changed
  /// them where they are: the streams that accumulate them come behind it.
  void moved() {
    if (on_device_) on_device_->moved();
  }
  /// Whether gradients need not be in their buckets where nobody reads these: on a device, if
  /// nothing is to be cast on the way.
  bool may_leave_buckets() const { return on_device_ && !converts_; }
  /// From now on gradients are in their buckets, whatever a script has given, and whether a pass
  /// has reached them or not.
  void stay_in_buckets();
  /// Gradients of this dtype are welcome too; see GradientSlot.
  void also_accept(at::ScalarType dtype);
  /// Whether `.grad` holds gradients of this rank.
  bool has_own(std::size_t index) const;

  /// Of a pass that failed before anything was sent: its copies are nobody's any more.
  void forget_copies();
  /// `.grad` gets what has become of the copies.
  void install_copies();
  /// The pass has averaged all.
  void settle();

  /// What is a view of its bucket holds averages in this rank's blocks only.
  void mark_averaged_in_part();
  /// Whether it holds such, which somebody makes whole now. What a script has put in its place is
  /// in the bucket then.
  bool take_averaged_in_part(std::size_t index);

  /// No other reducer may have one of the parameters in common.
  void claim();
  /// Throws StateError naming one that is common although some reducer has claimed it. `where`: as
  /// that of the constructor.
  void check_users(const std::function<std::string()>& where) const;
  /// Throws StateError naming one whose gradient has not been averaged.
  void check_averaged() const;

 private:
  /// What a parameter's `.grad` holds.
  enum class State : std::uint8_t {
    /// What it held after the last synchronisation.
    Settled,
    /// Nothing: autograd has come to the parameter without a gradient.
    None,
    /// Averages, in this rank's blocks only; see sharded_averages.h.
    AveragedInPart,
    /// Gradients of this rank, some of them added since.
    Own,
    /// Those too, and the bucket has a copy of them: the average is brought back from there.
    Copied,
  };

  void refuse_old_average(std::size_t index) const;
  void fill_without_gradient(std::size_t index);
  /// Of one that has not fired in this pass: whether `.grad` keeps its values unless some rank has
  /// a gradient, whatever the others put into the bucket.
  bool is_kept(std::size_t index) const;

  const std::string where_;
  std::vector<GradientSlot> slots_;
  std::vector<State> states_;
  bool converts_ = false;
  /// Where the parameters are on one.
  std::optional<DeviceGradients> on_device_;
};

}  // namespace libddp
