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
//   slots.take(index, in_pass);         // in the gradient's hook
//   slots.install_copies();             // at the end of the pass
//   slots.settle();

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/ddp/gradient_slot.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class GradientSlots {
 public:
  /// `where` begins the messages of errors. `as_bucket_view`: see
  /// ReducerOptions::gradient_as_bucket_view.
  GradientSlots(const NamedTensors& parameters, std::string where, bool as_bucket_view);

  std::size_t size() const { return slots_.size(); }
  GradientSlot& operator[](std::size_t index) { return slots_[index]; }
  const GradientSlot& operator[](std::size_t index) const { return slots_[index]; }
  auto begin() { return slots_.begin(); }
  auto end() { return slots_.end(); }
  auto begin() const { return slots_.begin(); }
  auto end() const { return slots_.end(); }

  /// Autograd has accumulated a gradient. ENSURES in a pass: the bucket has it.
  void take(std::size_t index, bool in_pass);
  /// The same of one that has no bucket.
  void take_without_bucket(std::size_t index);
  /// The bucket gets `.grad`, or zeros, of one that has not fired in this pass.
  void fill_without_gradient(std::size_t index);
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
  /// Whether it holds such, which somebody makes whole now.
  bool take_averaged_in_part(std::size_t index);

  /// No other reducer may have one of the parameters in common.
  void claim();
  /// Throws StateError naming one that is common although some reducer has claimed it. `where`: as
  /// that of the constructor.
  void check_users(const std::string& where) const;
  /// Throws StateError naming one whose gradient has not been averaged.
  void check_averaged() const;

 private:
  /// What a parameter's `.grad` holds.
  enum class State : std::uint8_t {
    /// What it held after the last synchronisation.
    Settled,
    /// Averages, in this rank's blocks only; see sharded_averages.h.
    AveragedInPart,
    /// Gradients of this rank, some of them added since.
    Own,
    /// Those too, and the bucket has a copy of them: the average is brought back from there.
    Copied,
  };

  void refuse_old_average(std::size_t index) const;

  const std::string where_;
  std::vector<GradientSlot> slots_;
  std::vector<State> states_;
};

}  // namespace libddp
