#pragma once

// What `.grad` of a FlatParameter's parameters shows between passes, and what is kept beside it:
// averages, and whole gradients that passes without synchronisation have accumulated.
//
// While a parameter shows its whole tensor, and while a pass runs, `.grad` is put aside: a shard
// there would contradict the shape, and autograd writes whole gradients there.
//
// NOTE [Gradients that are there already]
// New gradients are added in place to tensors in `.grad`, shards or a script's own, as by autograd.
// Passes that do not synchronise add up whole gradients, which wait for the pass that does. Between
// passes they are what `.grad` shows, so that scripts may scale them or let go of them (zero_grad),
// as in torch's FSDP1; or they are out of sight, as in torch's fully_shard. What `.grad` was before
// is kept beside them. Where nothing is sharded they are added to it, and averaged with it.
// Thread rule: one thread at a time.
//
//   AccumulatedGradients kept(spec);
//   kept.put_aside();                  // a pass without synchronisation begins
//   kept.add(grad, index);
//   kept.give_back();                  // `.grad` shows what waits, or what it was

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "libddp/fsdp/flat_spec.h"

namespace libddp {

class AccumulatedGradients {
 public:
  /// `spec` outlives it.
  explicit AccumulatedGradients(const FlatSpec& spec) : spec_(spec), entries_(spec.size()) {}

  /// Takes `.grad` of all parameters away, and gives back what it is to be between passes.
  void put_aside();
  void give_back();
  bool is_aside() const { return is_aside_; }
  /// The caller has written `.grad` itself.
  void forget_aside() { is_aside_ = false; }

  /// What `.grad` of a parameter was; new gradients are added to it. While is_aside.
  at::Tensor& kept(std::size_t index) { return entries_[index].aside; }
  const at::Tensor& kept(std::size_t index) const { return entries_[index].aside; }
  bool keeps_any() const;
  /// What was kept waits to be averaged too, where it is no average of shards.
  void let_kept_wait(std::size_t index);

  /// Adds to it in place, whoever's tensor it is; where there is none, a copy.
  void add_to_kept(const at::Tensor& mine, std::size_t index);

  /// Accumulates a whole gradient that waits to be averaged.
  void add(const at::Tensor& grad, std::size_t index);
  /// That of a parameter, unless `.grad` shows it; undefined if there is none.
  const at::Tensor& waiting(std::size_t index) const { return entries_[index].waiting; }
  /// Whether whole gradients wait, in sight or not.
  bool has_waiting() const;
  /// Whether a parameter belongs to the next average by what earlier passes have left.
  bool is_left(std::size_t index) const {
    return entries_[index].is_missing || entries_[index].waiting.defined();
  }
  /// Whether gradients that wait are in the memory of this tensor.
  bool is_in(const at::Tensor& block) const;
  /// A pass without synchronisation should have brought a gradient, which did not come: zeros.
  void mark_missing(std::size_t index);
  /// Nothing waits for this parameter any more.
  void clear_waiting(std::size_t index);
  /// A pass has failed.
  void clear_missing();

  /// Whether `.grad` shows between passes what waits (the default).
  void show_waiting(bool shows) { shows_waiting_ = shows; }
  bool shows_waiting() const { return shows_waiting_; }
  /// Whether `.grad` of a parameter shows one now; of some, of which this rank owns a part.
  bool shows_waiting(std::size_t index) const;
  bool shows_larger_gradients() const;

  /// The end of copies of whole gradients, which stood in `.grad`; see FullCopies. `keep`: they are
  /// what is kept from now on.
  void end_copy(std::size_t index, bool keep);

 private:
  struct Entry {
    at::Tensor aside;
    at::Tensor waiting;
    /// Whether `.grad` shows what waits.
    bool is_shown = false;
    bool is_missing = false;
  };

  void take_back(std::size_t index, at::Tensor grad);

  const FlatSpec& spec_;
  /// In the order of the parameters.
  std::vector<Entry> entries_;
  bool is_aside_ = false;
  bool shows_waiting_ = true;
};

}  // namespace libddp
