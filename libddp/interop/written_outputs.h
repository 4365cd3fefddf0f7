#pragma once

// Tells autograd which outputs a collective has written, so that it refuses a backward pass that
// would read what they held before.
//
// torch's Gloo writes the outputs of gathers, reduce-scatters and lists of all-to-all or all-reduce
// with copy_, which counts as a change of theirs, and divides averages with div_; other
// all-reduces, broadcast, scatter and all_to_all_single it writes in place, which does not count,
// and scripts rely on either. On CUDA only the list of an all-gather is copied.
//
//   note_written(c10d::OpType::ALLGATHER, outputs);
//
// Thread rule: as for changing the tensors.

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace libddp {

void note_written(c10d::OpType type, at::ArrayRef<at::Tensor> outputs);
/// What depends on the operation of an all-reduce or reduce.
void note_reduced(const c10d::ReduceOp& op, at::ArrayRef<at::Tensor> outputs);

}  // namespace libddp
