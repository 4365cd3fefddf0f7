#pragma once

// A reduction as another c10d backend can do it.
//
// The others know neither AVG on all devices nor a factor, so we divide and multiply here: after
// the sum, except for float16, where the sum could overflow. int16 travels as int32 and bool as
// bytes, which Gloo and MPI reduce.
// Thread rule: values; `tensor` belongs to the operation until `finish`.
//
//   C10dReduction reduction(tensor, ReduceOp::Avg, 1.0, world_size);
//   backend->allreduce(reduction.wires(), reduction.options(timeout))->wait();
//   reduction.finish(tensor);

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "libddp/base/reduce_op.h"

namespace libddp {

class C10dReduction {
 public:
  /// `input` is contiguous; it is reduced in place unless its dtype has to change or `keep_input`.
  C10dReduction(const at::Tensor& input, ReduceOp op, double scale, int num_ranks,
                bool keep_input = false);

  c10d::ReduceOp op() const { return op_; }
  /// What the other backend reduces, flat.
  const at::Tensor& wire() const { return wire_; }
  /// Writes the result into `output`: `reduced` is the wire, or a part of it.
  void finish(const at::Tensor& output, const at::Tensor& reduced) const;

 private:
  c10d::ReduceOp op_;
  at::Tensor wire_;
  double factor_after_ = 1.0;
  int divisor_after_ = 1;
};

/// The bytes of a contiguous tensor of any dtype; keeps it alive.
at::Tensor bytes_of(const at::Tensor& tensor);

}  // namespace libddp
