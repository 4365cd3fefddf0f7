#pragma once

// Parameters of a unit that have one dtype, as one flat array of which every rank owns the rows
// that flat_layout.h gives it.
//
// The parameter objects are those of the model, and stay so: `unshard` lets each show its whole
// tensor, `show_shards` the part that this rank owns, which is what optimizers see.
//
//   shards --unshard--> full --(forward)--> shards --gradient().begin_pass, unshard--> full
//     --gradient().accumulate of each, reduce--> shards --collect, install--> shards with gradients
//
// It does what it is told, and calls nobody: hooks are the ParamGroup's.
// Thread rule: one thread at a time. Collectives: construction, unshard; those of gradient() and
// copies().
//
//   FlatParameter flat("unit h.0", parameters, options, pool);
//   flat.show_shards();

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/accumulated_gradients.h"
#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_gradient.h"
#include "libddp/fsdp/flat_memory.h"
#include "libddp/fsdp/flat_spec.h"
#include "libddp/fsdp/full_copies.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/fsdp/trained_set.h"
#include "libddp/fsdp/two_versions.h"
#include "libddp/fsdp/write_check.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class FlatParameter {
 public:
  /// `parameters`: leaves of one dtype. Their values move into the flat array, and they show whole
  /// tensors: autograd's nodes, which hooks stand on, remember the shape and dtype that a parameter
  /// has when they are made.
  FlatParameter(std::string label, NamedTensors parameters, const ShardOptions& options,
                const std::shared_ptr<BufferPool>& pool);
  FlatParameter(const FlatParameter&) = delete;
  FlatParameter& operator=(const FlatParameter&) = delete;

  /// Which array of the model it is, alike on all ranks, and what its collectives are called from
  /// now on: others may be of the same name and size, and must not be taken for this one.
  void set_place(std::uint64_t place, std::string label);

  const FlatSpec& spec() const { return spec_; }
  std::size_t size() const { return spec_.size(); }
  const NamedTensors& parameters() const { return spec_.parameters; }
  const FlatLayout& layout() const { return spec_.layout; }
  /// The parameters that require gradients now.
  TrainedSet trained() const;

  FlatMemory& memory() { return *memory_; }
  FlatGradient& gradient() { return gradient_; }
  const FlatGradient& gradient() const { return gradient_; }
  AccumulatedGradients& accumulated() { return accumulated_; }
  const AccumulatedGradients& accumulated() const { return accumulated_; }
  FullCopies& copies() { return copies_; }

  /// Takes over values that users have put in the place of a shard (`p.data = values`), of the same
  /// shape and dtype. While nobody reads: before the barrier of the ranks.
  void take_written();
  /// Throws StateError where a parameter that should show its shard was given other data, sizes or
  /// dtype.
  void check_shards() const;

  /// Unshards, and lets the parameters show whole tensors, without gradients. Checks shards. True
  /// if they have not shown them before.
  bool unshard();
  /// A forward begins.
  void expect_no_writes();
  /// Throws ArgumentError where it has written into a parameter, on the CPU with several ranks.
  void check_unwritten();
  /// Lets the parameters show what this rank owns, and its gradients. The bytes of the array stay.
  void show_shards();
  bool is_unsharded() const { return shows_whole_; }
  /// Lets the parameters show this rank's part as a vector, where several ranks have parts: what
  /// takes it for a matrix fails. Until end_hiding, check_rows_unwritten or unshard.
  void hide_shards();
  void end_hiding();
  /// Ends hiding. Throws ArgumentError where a forward has written into a part meanwhile, on the
  /// CPU with several ranks; so does unshard.
  void check_rows_unwritten();
  /// The parameters are ordinary tensors from now on: whole, in memory of their own, with NaN for
  /// values (integers: 0), as this rank has rows of them only, and without gradients. Nothing but
  /// the destructor may follow. No collective: whatever has become of the group.
  void leave();

 private:
  bool shows_shards() const { return !shows_whole_ && !copies_.are_shown(); }
  /// On one host the others, which compute too, read what is written; between hosts it is lost. A
  /// script is refused alike on both. On devices it is lost, as with torch.
  bool refuses_writes() const;
  FlatLayout::Shape hidden_shape(std::size_t index) const;

  FlatSpec spec_;
  std::unique_ptr<FlatMemory> memory_;
  /// What the parameters show, in their order.
  std::vector<at::Tensor> whole_;
  std::vector<at::Tensor> shards_;
  bool shows_whole_ = true;
  bool are_hidden_ = false;
  /// Of the parameters, where several ranks have parts of them; else empty.
  std::vector<TwoVersions> counts_;
  WriteCheck write_check_;
  /// Of what is hidden.
  WriteCheck row_check_;
  AccumulatedGradients accumulated_;
  FlatGradient gradient_;
  FullCopies copies_;
};

}  // namespace libddp
