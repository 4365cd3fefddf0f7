#pragma once

// The gradients of a FlatParameter in a backward pass: from autograd's tensors to averaged shards.
//
// Gradients come from autograd whole; GradientStore has their memory. They are averaged over the
// ranks, and what this rank owns stands in `.grad` at the end of the pass.
//
//   begin_pass --accumulate of each--> reduce --> collect --> install
//
// NOTE [Who is trained]
// Each pass asks anew which parameters require gradients, so that scripts may freeze and unfreeze
// them at any time. The store has a place for each parameter; where none is trained there is
// nothing to average. A frozen parameter's `.grad` stays what it is.
// The ranks must train the same parameters: what they average is labelled with them.
// Thread rule: one thread at a time. Collectives: reduce, collect.
//
//   FlatGradient gradient(spec, pool, accumulated);
//   gradient.begin_pass(/*averages=*/true);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/fsdp/accumulated_gradients.h"
#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_spec.h"
#include "libddp/fsdp/gradient_store.h"
#include "libddp/fsdp/reduce_hook.h"
#include "libddp/fsdp/trained_set.h"

namespace libddp {

class FlatGradient {
 public:
  /// `spec` and `accumulated` outlive it.
  FlatGradient(const FlatSpec& spec, const std::shared_ptr<BufferPool>& pool,
               AccumulatedGradients& accumulated);
  FlatGradient(const FlatGradient&) = delete;
  FlatGradient& operator=(const FlatGradient&) = delete;

  const FlatSpec& spec() const { return spec_; }

  /// Puts `.grad` aside: autograd will write whole gradients there. Where the pass does not average
  /// they wait for one that does.
  void begin_pass(bool averages);
  bool is_in_pass() const { return pass_.has_value(); }
  /// Whether gradients of this pass are still to come, and whether all parameters are trained by
  /// it.
  bool awaits_any() const { return pass_ && pass_->num_awaited > 0; }
  bool trains_all() const { return pass_ && pass_->trains_all; }
  /// Moves the gradient of a parameter into the store. True if it was the last one missing. Throws
  /// StateError where it cannot be averaged.
  bool accumulate(std::size_t index);

  /// Whether there is something to average: a parameter that this pass, or one before it that did
  /// not synchronise, has trained.
  bool wants_average() const;
  /// The parameters that get an average.
  TrainedSet averaged() const;
  /// Starts to average; gradients that are missing count as zeros.
  void reduce();
  /// Instead of reduce, for who averages several arrays at once: reads `whole`, writes `average`,
  /// and ends it. Where nothing is sharded the two are one.
  void begin_reduction();
  const at::Tensor& whole() const { return store_->whole(); }
  const at::Tensor& average() const { return store_->average(); }
  void end_reduction();
  bool is_averaged() const { return pass_ && pass_->stage == Stage::Averaged; }
  /// Of `whole`.
  std::size_t num_bytes() const;

  /// Averages over all ranks, or sums over all ranks divided by what the script wants.
  void divide_by(std::optional<double> divisor) { divisor_ = divisor; }
  std::optional<double> divisor() const { return divisor_; }
  /// How the first group, and the group of replicas after it, reduces.
  ReduceOptions first_reduction() const;
  ReduceOptions second_reduction() const;
  /// In place of the group's collective.
  void reduce_by(ReduceHook hook) { reduce_hook_ = std::move(hook); }
  bool has_reduce_hook() const { return static_cast<bool>(reduce_hook_); }
  /// Parameters that no rank has used in a pass get zeros, or keep what they have; nullopt: zeros
  /// beside others that some rank has used.
  void zero_unused(std::optional<bool> zeroes) { zeroes_unused_ = zeroes; }

  /// Waits for what `reduce` started and gives its buffer back.
  void collect();
  /// More gradients come in a pass whose average is there: they are averaged by themselves and
  /// added to it, as those of another pass are.
  void begin_again();
  /// The end of a pass: `.grad` shows shards again.
  void install();
  /// After a pass that failed: `.grad` is what it was before; what the pass had done is lost.
  void abandon();

  /// Whether the last `install` gave a parameter an average whose hooks have not run yet.
  bool is_installed(std::size_t index) const { return arrivals_[index] == Arrival::Installed; }
  /// They run now; false if there was none.
  bool take_installed(std::size_t index);

  /// Whether memory of averaged gradients is there; somebody may have kept one.
  bool has_memory() const { return store_->has_memory(); }

 private:
  /// The gradient of a parameter in a pass.
  enum class Arrival : std::uint8_t {
    None,     // it does not come, or waits without being averaged
    Awaited,  // this pass brings it
    Here,     // the store has it
    Installed,
  };
  enum class Stage : std::uint8_t { Gradients, Reducing, Averaged };
  struct Pass {
    bool averages = true;
    std::size_t num_awaited = 0;
    bool trains_all = false;
    Stage stage = Stage::Gradients;
    WorkPtr work;
  };

  /// Whether a parameter gets an average from this pass.
  bool is_averaged(std::size_t index) const {
    return arrivals_[index] != Arrival::None || accumulated_.is_left(index);
  }
  void check(const at::Tensor& grad, std::size_t index) const;
  std::vector<bool> averaged_flags() const;
  void end_pass_without_average();
  /// Whether `store_` is to tell which parameters were used.
  bool asks_for_used() const;
  void leave_out_unused();

  const FlatSpec& spec_;
  AccumulatedGradients& accumulated_;
  const std::unique_ptr<GradientStore> store_;
  std::vector<Arrival> arrivals_;
  std::optional<Pass> pass_;
  std::optional<double> divisor_;
  ReduceHook reduce_hook_;
  std::optional<bool> zeroes_unused_;
};

}  // namespace libddp
