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
      return true;
    default:
      return false;
  }
}

}  // namespace

void note_written(c10d::OpType type, at::ArrayRef<at::Tensor> outputs) {
  if (!are_copied(type)) return;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || output.is_inference()) continue;
    if (!output.is_cpu() && type != c10d::OpType::ALLGATHER) continue;
    output.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace libddp
