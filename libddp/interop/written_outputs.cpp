#include "libddp/interop/written_outputs.h"

namespace libddp {
namespace {

bool are_copied(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
    case c10d::OpType::ALLGATHER_COALESCED:
    case c10d::OpType::GATHER:
    case c10d::OpType::REDUCE_SCATTER:
    case c10d::OpType::_REDUCE_SCATTER_BASE:
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::COALESCED:
    case c10d::OpType::ALLREDUCE_COALESCED:
    case c10d::OpType::_ALLREDUCE_SPARSE:
      return true;
    default:
      return false;
  }
}

void note_each(at::ArrayRef<at::Tensor> outputs, bool on_devices) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || output.is_inference() || (!output.is_cpu() && !on_devices)) continue;
    output.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void note_written(c10d::OpType type, at::ArrayRef<at::Tensor> outputs) {
  if (are_copied(type)) note_each(outputs, /*on_devices=*/type == c10d::OpType::ALLGATHER);
}

void note_reduced(const c10d::ReduceOp& op, at::ArrayRef<at::Tensor> outputs) {
  if (op == c10d::ReduceOp::AVG) note_each(outputs, /*on_devices=*/false);
}

}  // namespace libddp
