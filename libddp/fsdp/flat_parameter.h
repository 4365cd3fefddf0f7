#pragma once

// The parameters of a unit that have one dtype, as one flat array of which every rank owns a block.
//
// The parameter objects are those of the model, and stay so: `show_full` lets each show its whole
// tensor, `show_pieces` the part that this rank owns, which is what optimizers see. Gradients come
// from autograd whole; they are copied once into a flat array of the same layout, averaged over the
// ranks, and what this rank owns stands in `.grad` at the end of the pass. While a parameter shows
// its whole tensor, `.grad` is put aside: a piece there would contradict the shape.
//
//   pieces --show_full--> full --(forward)--> pieces --hide_gradients, show_full--> full
//     --take_gradient of each, reduce--> pieces --collect, install--> pieces with gradients
//
// NOTE [Gradients that are there already]
// Where `.grad` holds pieces from an earlier pass, new gradients are added to them. Passes that do
// not synchronise add up whole gradients, which take the memory of the whole array until the pass
// that does.
//
// NOTE [Memory of gradients]
// The pieces in `.grad` are parts of one block, which lasts while somebody has one of them: it is
// let go at the beginning of a step or pass where no parameter has a gradient (zero_grad). It comes
// from the allocator of ordinary tensors, so activations use the same memory meanwhile. Where
// nothing is sharded it lies in the group's arena and stays.
// Thread rule: one thread at a time. Collectives: make, unshard, reduce, collect.
//
//   FlatParameter flat("unit h.0", parameters, options, pool);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_layout.h"
#include "libddp/fsdp/flat_memory.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/group/named_tensor.h"

namespace libddp {

class FlatParameter {
 public:
  /// `parameters`: leaves of one dtype that all require gradients, or none does. Their values move
  /// into the flat array. `on_gradient`: autograd has accumulated the gradient of this parameter.
  FlatParameter(std::string label, NamedTensors parameters, const ShardOptions& options,
                std::shared_ptr<BufferPool> pool,
                const std::function<void(std::size_t)>& on_gradient);
  FlatParameter(const FlatParameter&) = delete;
  FlatParameter& operator=(const FlatParameter&) = delete;

  std::size_t size() const { return parameters_.size(); }
  const NamedTensors& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  bool is_trained() const { return is_trained_; }

  FlatMemory& memory() { return *memory_; }
  /// Unshards, and lets the parameters show whole tensors, without gradients. Throws StateError
  /// where one of them was given other data, sizes or dtype since it showed its piece.
  void show_full();
  /// Lets the parameters show what this rank owns, and its gradients. The bytes of the array stay.
  void show_pieces();
  struct CopyOptions {
    /// `.grad` shows copies of the whole averaged gradients too.
    bool with_gradients = false;
    /// Whether this rank is one that shows them; all take part.
    bool here = true;
  };
  /// Lets the parameters show copies of the whole tensors, which may be changed; `keep` takes what
  /// this rank owns of them over. Throws StateError where a copy has another shape then.
  void show_copies(const CopyOptions& options);
  void end_copies(bool keep);

  /// Lets the memory of gradients go where no parameter has one.
  void release_gradients();

  // A backward pass.
  /// Puts `.grad` aside: autograd will write whole gradients there.
  void hide_gradients();
  bool hides_gradients() const { return hides_gradients_; }
  /// Moves the gradient of a parameter into the flat array. True if it was the last one missing.
  bool take_gradient(std::size_t index);
  /// Whether whole gradients are there that have not been averaged.
  bool has_gradients() const { return gradients_.defined(); }
  /// Starts to average; gradients that are missing count as zeros.
  void reduce();
  /// Instead of reduce, for who averages several arrays at once: reads `whole_gradient`, writes
  /// `average`, and ends it. Where nothing is sharded the two are one.
  void begin_reduction();
  const at::Tensor& whole_gradient() const { return gradients_; }
  const at::Tensor& average() const { return reduced_; }
  void end_reduction();
  const ShardOptions& options() const { return options_; }
  /// Of `whole_gradient`.
  std::size_t gradient_bytes() const;
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  /// Waits for what `reduce` started and gives its buffer back.
  void collect();
  /// The end of a pass: `.grad` shows pieces again.
  void install();
  /// After a pass that failed: `.grad` is what it was before; what the pass had done is lost.
  void abandon();

  /// The block of gradients, [block_numel]; undefined where there are none.
  const at::Tensor& gradient_block() const { return gradient_block_; }

 private:
  void check_pieces() const;
  /// Takes what this rank owns of the whole tensor that a parameter shows into the own block.
  void take_piece(std::size_t index);
  /// Whole tensors with memory of their own, of what each rank brings a block.
  std::vector<at::Tensor> whole_parameters();
  std::vector<at::Tensor> whole_gradients() const;
  at::Tensor gather(const at::Tensor& block) const;
  at::Tensor own_part(const at::Tensor& whole, std::size_t index) const;
  std::string wrong_copy() const;
  void end_gradient_copy(std::size_t index, bool keep);
  at::Tensor piece_of(const at::Tensor& block, std::size_t index) const;
  void put_gradients_aside();
  void give_gradients_back();
  void forget_gradients();
  void make_gradient_pieces();
  void check(const at::Tensor& grad, std::size_t index) const;
  void copy_in(const at::Tensor& grad, std::size_t index);
  void fill_missing();
  void begin_array();
  /// `is_overwritten`: all of it, so that it need not be zeros.
  void begin_block(bool is_overwritten);
  void end_array();
  void add_to_block(const at::Tensor& result);
  void add_kept(const at::Tensor& result, bool is_there);
  bool keeps_any() const;
  int rank() const { return options_.shard ? options_.shard->rank() : 0; }
  bool is_sharded() const { return options_.shard && options_.shard->size() > 1; }

  const std::string label_;
  const NamedTensors parameters_;
  const ShardOptions options_;
  const std::shared_ptr<BufferPool> pool_;
  const FlatLayout layout_;
  const at::ScalarType dtype_;
  const at::ScalarType compute_dtype_;
  const at::ScalarType reduce_dtype_;
  const at::ScalarType gradient_dtype_;
  const bool is_trained_;
  std::unique_ptr<FlatMemory> memory_;
  std::vector<at::Tensor> full_;
  std::vector<at::Tensor> pieces_;
  bool shows_full_ = false;
  bool shows_copies_ = false;
  /// What `.grad` was before it showed copies; empty where it does not.
  std::vector<at::Tensor> kept_gradients_;

  bool hides_gradients_ = false;
  /// What `.grad` was before the pass, or before whole tensors were shown; and whether new ones are
  /// added to it.
  bool has_hidden_ = false;
  std::vector<at::Tensor> hidden_;
  std::vector<std::uint8_t> keeps_;
  /// Whole gradients, in the pool's memory; where nothing is sharded, gradient_block_ itself if
  /// nothing stands there.
  at::Tensor gradients_;
  std::vector<std::uint8_t> filled_;
  std::vector<std::uint8_t> fired_;
  std::size_t num_fired_ = 0;
  at::Tensor gradient_block_;
  std::vector<at::Tensor> gradient_pieces_;
  /// What the running reduction writes.
  at::Tensor reduced_;
  WorkPtr work_;

  // Last: destroyed first, so no hook runs into a half-destroyed object.
  std::unique_ptr<AccumulateHooks> hooks_;
};

}  // namespace libddp
