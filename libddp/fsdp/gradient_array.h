#pragma once

// The whole gradients of one pass as one array: the ranks' blocks one behind the other, which is
// what a reduce-scatter reads.
//
// The array is the pool's memory, or the own block where that is the same. A gradient is copied in
// once, cut into the ranks' shards.
// Thread rule: one thread at a time.
//
//   GradientArray array(spec, pool);
//   array.begin();
//   array.add(grad, index);
//   array.complete(/*notes_used=*/false);
//   group->reduce_scatter_into(block, array.tensor(), op);
//   array.end();

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_spec.h"

namespace libddp {

class GradientArray {
 public:
  /// `spec` outlives it.
  GradientArray(const FlatSpec& spec, std::shared_ptr<BufferPool> pool);

  /// [blocks_numel] in the dtype of the reduction; undefined between `end` and `begin`.
  const at::Tensor& tensor() const { return tensor_; }
  bool has_begun() const { return tensor_.defined(); }
  /// In memory of the pool, or in a tensor of the caller's, whose contents do not count.
  void begin();
  void begin_in(at::Tensor tensor);
  /// Copies a gradient in, or adds it to the one that is there.
  void add(const at::Tensor& grad, std::size_t index);
  /// Zeros where no gradient came. `notes_used`: so that the average tells whether any rank has
  /// used a parameter, see `take_note`.
  void complete(bool notes_used);
  /// Gives the memory back.
  void end();

  /// Whether any rank had a gradient of a parameter, by a block of the average; clears the note.
  bool take_note(const at::Tensor& average, std::size_t index) const;

 private:
  void copy_bytes_in(const at::Tensor& grad, std::size_t index);
  void note_used();

  const FlatSpec& spec_;
  const std::shared_ptr<BufferPool> pool_;
  /// What note_used writes.
  const at::Tensor one_;
  at::Tensor tensor_;
  bool is_pools_ = false;
  /// Which gradients are there.
  std::vector<bool> filled_;
};

}  // namespace libddp
