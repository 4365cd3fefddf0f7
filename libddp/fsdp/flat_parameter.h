#pragma once

// Parameters of a unit that have one dtype, as one flat array of which every rank owns the rows
// that flat_layout.h gives it.
//
// The parameter objects are those of the model, and stay so: `unshard` lets each show its whole
// tensor, `show_shards` the part that this rank owns, which is what optimizers see. Gradients come
// from autograd whole; they are copied once into an array of the ranks' blocks, averaged over the
// ranks, and what this rank owns stands in `.grad` at the end of the pass. While a parameter shows
// its whole tensor, `.grad` is put aside: a shard there would contradict the shape.
//
//   shards --unshard--> full --(forward)--> shards --begin_pass, unshard--> full
//     --accumulate_gradient of each, reduce--> shards --collect, install--> shards with gradients
//
// NOTE [Who is trained]
// Each pass asks anew which parameters require gradients, so that scripts may freeze and unfreeze
// them at any time. The array of gradients has a place for each parameter; where none is trained
// there is no such array, and nothing to average. A frozen parameter's `.grad` stays what it is.
// The ranks must train the same parameters: what they average is labelled with them.
//
// NOTE [Gradients that are there already]
// New gradients are added in place to tensors in `.grad`, shards or a script's own, as by autograd.
// Passes that do not synchronise add up whole gradients, which wait for the pass that does. Between
// passes they are what `.grad` shows, so that scripts may scale them or let go of them (zero_grad),
// as in torch's FSDP1; or they are out of sight, as in torch's fully_shard. What `.grad` was before
// is kept beside them. Where nothing is sharded they are added to it, and averaged with it.
//
// NOTE [Memory of gradients]
// The shards in `.grad` are parts of one block, which nobody else has between passes: it goes with
// the last of them (zero_grad). It comes from the allocator of ordinary tensors, so activations use
// the same memory meanwhile. Where nothing is sharded it lies in the group's arena and stays.
// Thread rule: one thread at a time. Collectives: make, unshard, reduce, collect.
//
//   FlatParameter flat("unit h.0", parameters, options, pool);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/autograd/late_hooks.h"
#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_layout.h"
#include "libddp/fsdp/flat_memory.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/fsdp/trained_set.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class FlatParameter {
 public:
  /// `parameters`: leaves of one dtype. Their values move into the flat array. `on_gradient`:
  /// autograd has accumulated the gradient of this parameter.
  FlatParameter(std::string label, NamedTensors parameters, const ShardOptions& options,
                std::shared_ptr<BufferPool> pool,
                const std::function<void(std::size_t)>& on_gradient);
  FlatParameter(const FlatParameter&) = delete;
  FlatParameter& operator=(const FlatParameter&) = delete;

  /// Which array of the model it is, alike on all ranks, and what its collectives are called from
  /// now on: others may be of the same name and size, and must not be taken for this one.
  void set_place(std::uint64_t place, std::string label);
  std::uint64_t place() const { return place_; }

  std::size_t size() const { return parameters_.size(); }
  const NamedTensors& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  /// The parameters that require gradients now.
  TrainedSet trained() const;

  /// Takes over values that users have put in the place of a shard (`p.data = values`), of the same
  /// shape and dtype. While nobody reads: before the barrier of the ranks.
  void take_written();

  /// Throws StateError where a parameter that should show its shard was given other data, sizes or
  /// dtype.
  void check_shards() const;

  FlatMemory& memory() { return *memory_; }
  /// Unshards, and lets the parameters show whole tensors, without gradients. Checks shards.
  void unshard();
  /// Lets the parameters show what this rank owns, and its gradients. The bytes of the array stay.
  void show_shards();
  bool is_unsharded() const { return shows_ == Shows::Full; }
  struct CopyOptions {
    /// `.grad` shows copies of the whole averaged gradients too.
    bool with_gradients = false;
    /// Whether this rank is one that shows them; all take part.
    bool here = true;
  };
  /// Throws StateError where `.grad` shows something else than averages. Before any rank waits.
  void check_copies(const CopyOptions& options) const;
  /// Lets the parameters show copies of the whole tensors, which may be changed; `keep` takes what
  /// this rank owns of them over. Throws StateError where a copy has another shape then.
  void show_copies(const CopyOptions& options);
  void end_copies(bool keep);

  // A backward pass.
  /// Puts `.grad` aside: autograd will write whole gradients there. Where the pass does not average
  /// they wait for one that does.
  void begin_pass(bool averages);
  bool is_in_pass() const { return pass_.has_value(); }
  /// Whether gradients of this pass are still to come, and whether all parameters are trained by
  /// it.
  bool awaits_any() const { return pass_ && pass_->num_awaited > 0; }
  bool trains_all() const { return pass_ && pass_->trains_all; }
  /// Moves the gradient of a parameter into the flat array. True if it was the last one missing.
  bool accumulate_gradient(std::size_t index);
  /// Whether whole gradients of passes before this one wait to be averaged.
  bool has_waiting() const;
  /// Whether `.grad` shows them between passes (the default).
  void show_waiting(bool shows) { shows_waiting_ = shows; }
  /// Whether `.grad` of a parameter shows one now; of some, of which this rank owns a part.
  bool shows_waiting(std::size_t index) const;
  bool shows_larger_gradients() const;
  /// Whether there is something to average: a parameter that this pass, or one before it that did
  /// not synchronise, has trained.
  bool wants_average() const;
  /// Starts to average; gradients that are missing count as zeros.
  void reduce();
  /// Instead of reduce, for who averages several arrays at once: reads `whole_gradient`, writes
  /// `average`, and ends it. Where nothing is sharded the two are one.
  void begin_reduction();
  const at::Tensor& whole_gradient() const { return gradients_; }
  const at::Tensor& average() const { return pass_->average; }
  void end_reduction();
  bool is_averaged() const { return pass_ && pass_->stage == Stage::Averaged; }
  const ShardOptions& options() const { return options_; }
  /// Averages over all ranks, or sums over all ranks divided by what the script wants.
  void divide_gradients_by(std::optional<double> divisor) { divisor_ = divisor; }
  std::optional<double> divisor() const { return divisor_; }
  /// Gets the whole gradients, the ranks' blocks one behind the other with zeros where nothing
  /// came, and the own block, to be filled with what `.grad` is to be; where nothing is sharded
  /// both are one tensor.
  using ReduceHook = std::function<void(const at::Tensor& gradients, const at::Tensor& average)>;
  /// In place of the group's collective.
  void reduce_by(ReduceHook hook) { reduce_hook_ = std::move(hook); }
  /// Parameters that no rank has used in a pass get zeros; else they keep what they have.
  void zero_unused(bool zeroes) { zeroes_unused_ = zeroes; }
  /// How the first group, and the group of replicas after it, reduces.
  ReduceOptions first_reduction() const;
  ReduceOptions second_reduction() const;
  /// Of `whole_gradient`.
  std::size_t gradient_bytes() const;
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  /// The parameters that get an average.
  TrainedSet averaged() const;
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
  bool is_installed(std::size_t index) const {
    return members_[index].gradient == Gradient::Installed;
  }
  /// Whether users have put hooks on one of the parameters that run when `.grad` is written.
  bool has_late_hooks() const;
  /// Runs those of the parameters that the last `install` gave an average.
  void run_late_hooks();

  /// Whether memory of averaged gradients is there; somebody may have kept one.
  bool has_gradient_memory() const {
    return gradient_block_.defined() || (gradient_storage_ && !gradient_storage_->expired());
  }

 private:
  /// What the parameters show.
  enum class Shows : std::uint8_t { Pieces, Full, Copies };
  /// The new gradient of a parameter.
  enum class Gradient : std::uint8_t {
    None,       // it is not trained
    Awaited,    // this pass brings it
    Absent,     // it did not come: zeros
    Waiting,    // it is in `waiting`, where one of an Awaited may be too
    Here,       // it is in the array
    Installed,  // `.grad` is the average
  };
  enum class Stage : std::uint8_t { Gradients, Reducing, Averaged };
  struct Pass {
    bool averages = true;
    std::size_t num_awaited = 0;
    bool trains_all = false;
    Stage stage = Stage::Gradients;
    /// What the reduction writes.
    at::Tensor average;
    WorkPtr work;
  };
  struct Member {
    at::Tensor full;
    at::Tensor shard;
    /// What `.grad` was while gradients_are_aside_; new ones are added to it.
    at::Tensor aside;
    /// The whole gradient that waits to be averaged, unless `.grad` shows it.
    at::Tensor waiting;
    bool shows_waiting = false;
    Gradient gradient = Gradient::None;
  };

  /// Takes what this rank owns of the whole tensor that a parameter shows into the own block.
  void take_shard(std::size_t index);
  /// Whole tensors with memory of their own, of what each rank brings a block.
  std::vector<at::Tensor> whole_parameters();
  std::vector<at::Tensor> whole_gradients() const;
  at::Tensor gather(const at::Tensor& block) const;
  at::Tensor put_together(const at::Tensor& blocks, std::size_t index) const;
  std::string wrong_copy() const;
  void end_gradient_copy(std::size_t index, bool keep);
  /// Of this rank, in its block; of any rank, in all blocks.
  at::Tensor shard_of(const at::Tensor& block, std::size_t index) const;
  at::Tensor shard_in(const at::Tensor& blocks, std::size_t index, int rank) const;
  void put_gradients_aside();
  void give_gradients_back();
  void take_back(std::size_t index, at::Tensor grad);
  void add_to_waiting(const at::Tensor& grad, std::size_t index);
  void fill_in_waiting();
  at::Tensor make_gradient_shard(std::size_t index) const;
  void check(const at::Tensor& grad, std::size_t index) const;
  void copy_in(const at::Tensor& grad, std::size_t index);
  void copy_bytes_in(const at::Tensor& grad, std::size_t index);
  void fill_missing();
  void note_used();
  void leave_out_unused(const at::Tensor& result);
  void begin_array();
  /// `is_overwritten`: all of it, so that it need not be zeros.
  void begin_block(bool is_overwritten);
  void end_array();
  void end_pass_without_average();
  void move_to_block(const at::Tensor& result);
  void add_to_kept(const at::Tensor& result);
  /// Whether the array has a gradient of this parameter.
  bool is_filled(std::size_t index) const;
  bool keeps_any() const;
  bool is_block_waiting() const;
  int rank() const { return options_.shard ? options_.shard->rank() : 0; }
  bool is_sharded() const { return options_.shard && options_.shard->size() > 1; }

  const std::string label_;
  /// Of its collectives.
  std::string call_label_;
  std::uint64_t place_ = 0;
  const NamedTensors parameters_;
  const ShardOptions options_;
  const std::shared_ptr<BufferPool> pool_;
  const FlatLayout layout_;
  const at::ScalarType dtype_;
  const at::ScalarType compute_dtype_;
  const at::ScalarType reduce_dtype_;
  const at::ScalarType gradient_dtype_;
  std::unique_ptr<FlatMemory> memory_;
  /// In the order of parameters_.
  std::vector<Member> members_;
  Shows shows_ = Shows::Pieces;
  bool gradients_are_aside_ = false;
  std::optional<double> divisor_;
  ReduceHook reduce_hook_;
  bool zeroes_unused_ = true;
  bool shows_waiting_ = true;
  /// What note_used writes.
  const at::Tensor one_;
  std::optional<Pass> pass_;
  /// Whole gradients of a pass, in the pool's memory; where nothing is sharded, gradient_block_
  /// itself if nothing stands there.
  at::Tensor gradients_;
  at::Tensor gradient_block_;
  /// That of the last pass, as long as somebody has a part of it.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> gradient_storage_;

  // Last: destroyed first, so no hook runs into a half-destroyed object. Null where the dtype has
  // no gradients.
  std::unique_ptr<LateHooks> late_hooks_;
  std::unique_ptr<AccumulateHooks> hooks_;
};

}  // namespace libddp
