#pragma once

// Reduction over several tensors of this rank, for calls that pass a list of them.
// Thread rule: free functions; any thread.
//
//   reduce_into_first(tensors, opts.reduceOp);   // then all-reduce tensors[0]
//   copy_first_to_rest(tensors);

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace libddp {

/// tensors[0] = op over all of `tensors`; each is premultiplied first where the op says so.
void reduce_into_first(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

void copy_first_to_rest(const std::vector<at::Tensor>& tensors);

}  // namespace libddp
