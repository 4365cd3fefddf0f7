#pragma once

// The averaged gradients that this rank owns: one block, of which the shards in `.grad` are parts.
//
// NOTE [Memory of gradients]
// Nobody else has the block between passes: it goes with the last of its shards (zero_grad). It
// comes from the allocator of ordinary tensors, so activations use the same memory meanwhile. Where
// nothing is sharded, on the host, it lies in the group's arena and stays, unless a script has kept
// a gradient of it.
// Thread rule: one thread at a time.
//
//   GradientBlock block(spec);
//   block.begin(/*is_overwritten=*/true);
//   group->reduce_scatter_into(block.tensor(), gradients, op);
//   parameter.mutable_grad() = block.shard(index);
//   block.release();

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "libddp/fsdp/flat_spec.h"

namespace libddp {

class GradientBlock {
 public:
  /// `spec` outlives it.
  explicit GradientBlock(const FlatSpec& spec);

  /// [block_numel] in the dtype of `.grad`; undefined where there is none.
  const at::Tensor& tensor() const { return tensor_; }
  /// `is_overwritten`: all of it, so that it need not be zeros. Without effect where one is there.
  void begin(bool is_overwritten);
  /// A part of the block, in a parameter's form, for `.grad`.
  at::Tensor shard(std::size_t index) const;
  /// Remembers whose memory the shards show.
  void note_shown();
  /// `.grad` alone has it from now on, unless it stays.
  void release();
  /// One that stays goes to who has kept a part of it. Where `.grad` shows none.
  void leave_to_keepers();
  /// Whether memory of shards that were shown is there; somebody may have kept one.
  bool has_memory() const { return tensor_.defined() || (shown_ && !shown_->expired()); }
  /// The block that the tensors of all parameters are the shards of, in this order; undefined where
  /// one of them is something else. An undefined tensor is none of a block.
  at::Tensor block_of(const std::vector<at::Tensor>& shards) const;

 private:
  const FlatSpec& spec_;
  /// Of the own shards.
  std::vector<FlatLayout::Shape> shapes_;
  at::Tensor tensor_;
  /// That of the last pass, as long as somebody has a part of it.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> shown_;
};

}  // namespace libddp
