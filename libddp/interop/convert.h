#pragma once

// c10d's options and tensors in libddp's terms.
// Thread rule: free functions; any thread.
//
//   group->all_reduce(tensor, {.op = reduce_op(opts.reduceOp)},
//                     call_options(opts.timeout, opts.asyncOp));

#include <ATen/core/Tensor.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "libddp/group/process_group.h"
#include "libddp/host/reconfigure_plan.h"

namespace libddp {

/// kUnsetTimeout becomes the group's own.
CallOptions call_options(std::chrono::milliseconds timeout, bool async);

#ifdef C10D_BACKEND_HAS_RECONFIGURE
/// A list of handles is ordered, a set is not. ArgumentError for hints, of which libddp knows none.
ReconfigureRequest reconfigure_request(const c10d::ReconfigureOptions& opts);
#endif

/// SUM for PREMUL_SUM (see premultiplied). ArgumentError for one that libddp does not know.
ReduceOp reduce_op(const c10d::ReduceOp& op);

/// True for PREMUL_SUM: each rank's input counts times that rank's factor.
bool is_premultiplied(const c10d::ReduceOp& op);
/// Multiplies `tensor` in place by the factor of a PREMUL_SUM.
void premultiply(const c10d::ReduceOp& op, const at::Tensor& tensor);

/// A view for operations that only move elements: dtypes that libddp has no name for (uint16,
/// float8, ...) as bytes.
at::Tensor movable(const at::Tensor& tensor);
std::vector<at::Tensor> movable(const std::vector<at::Tensor>& tensors);

/// `tensor` in the shape of `like` if it has as many elements and is contiguous; else as it is.
/// Scripts gather 0-dim tensors into outputs of shape [1].
at::Tensor shaped_like(const at::Tensor& tensor, const at::Tensor& like);

}  // namespace libddp
