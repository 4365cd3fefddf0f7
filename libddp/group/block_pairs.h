#pragma once

// The tensors of an all-gather or a reduce-scatter of several at once, checked, and how they reach
// a backend: as they are where it takes lists, else packed into one tensor of blocks.
// Thread rule: belongs to one call.
//
//   const BlockPairs pairs(site, "outputs", outputs, Access::Write, "inputs", inputs,
//   Access::Read); return state.issue(std::move(call), inputs, [&](Backend& to, BackendCall&& made)
//   {
//     return pairs.gather(to, std::move(made));
//   });

#include <ATen/core/Tensor.h>

#include <vector>

#include "libddp/group/list_backend.h"
#include "libddp/group/operand.h"

namespace libddp {

class BlockPairs {
 public:
  /// Throws ArgumentError where the lists differ in length or are empty, or a tensor of `wholes`
  /// does not hold world_size blocks of that of `blocks`.
  BlockPairs(OperationSite& site, const char* whole_argument, const std::vector<at::Tensor>& wholes,
             Access whole_access, const char* block_argument, const std::vector<at::Tensor>& blocks,
             Access block_access);

  Dtype dtype() const { return wholes_.front().dtype; }
  std::int64_t numel() const { return total_numel(wholes_); }

  WorkPtr gather(Backend& to, BackendCall call) const;
  WorkPtr reduce_scatter(Backend& to, BackendCall call, double scale) const;

 private:
  std::vector<BlockPair> pairs() const;
  /// Where each of `wholes_` lies in the packed blocks, as [world_size, elements].
  std::vector<at::Tensor> places_in(const at::Tensor& packed) const;
  std::vector<at::Tensor> whole_rows() const;

  const int world_size_;
  std::vector<Operand> wholes_;
  std::vector<Operand> blocks_;
};

}  // namespace libddp
