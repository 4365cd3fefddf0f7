#pragma once

// What a backend may offer beside Backend: one operation over several tensors where they lie, as
// one launch. Groups of other backends pack such lists into one tensor.
// Thread rule: as Backend.
//
//   if (ListBackend* const lists = backend.lists()) {
//     return lists->all_gather_each(std::move(call), {{whole, own}, {other_whole, other_own}});
//   }

#include <ATen/core/Tensor.h>

#include <vector>

#include "libddp/group/backend.h"

namespace libddp {

/// A tensor of world_size blocks, and one block.
struct BlockPair {
  at::Tensor whole;
  at::Tensor block;
};

/// Tensors arrive as for Backend; those of a list have one dtype, and sizes of their own.
class ListBackend {
 public:
  virtual ~ListBackend() = default;
  virtual WorkPtr all_reduce_each(BackendCall call, std::vector<at::Tensor> tensors,
                                  double scale) = 0;
  /// Of each pair `whole` is written.
  virtual WorkPtr all_gather_each(BackendCall call, std::vector<BlockPair> pairs) = 0;
  /// Of each pair `block` is written.
  virtual WorkPtr reduce_scatter_each(BackendCall call, std::vector<BlockPair> pairs,
                                      double scale) = 0;
};

}  // namespace libddp
