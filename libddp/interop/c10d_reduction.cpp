#include "libddp/interop/c10d_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

namespace libddp {
namespace {

/// Our own arithmetic is no business of autograd.
using NoAutograd = at::AutoDispatchBelowADInplaceOrView;

c10d::ReduceOp::RedOpType torch_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return c10d::ReduceOp::SUM;
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Band:
      return c10d::ReduceOp::BAND;
    case ReduceOp::Bor:
      return c10d::ReduceOp::BOR;
    case ReduceOp::Bxor:
      return c10d::ReduceOp::BXOR;
  }
  return c10d::ReduceOp::SUM;
}

/// On bytes that are 0 or 1.
c10d::ReduceOp::RedOpType bool_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Band:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Bxor:
      return c10d::ReduceOp::BXOR;
    default:
      return c10d::ReduceOp::MAX;
  }
}

}  // namespace

C10dReduction::C10dReduction(const at::Tensor& input, ReduceOp op, double scale, int num_ranks,
                             bool keep_input)
    : op_(torch_op(op)), wire_(input.detach().view({-1})) {
  NoAutograd guard;
  const at::ScalarType dtype = input.scalar_type();
  if (dtype == at::kBool) {
    op_ = bool_op(op);
    wire_ = wire_.to(at::kByte);
  } else if (dtype == at::kShort) {
    wire_ = wire_.to(at::kInt);
  } else if (keep_input) {
    wire_ = wire_.clone();
  }
  const bool is_average = op == ReduceOp::Avg;
  if (dtype == at::kHalf && (is_average || op == ReduceOp::Sum)) {
    // The sum alone may be infinite.
    const double factor = is_average ? scale / num_ranks : scale;
    if (factor != 1.0) wire_.mul_(factor);
    return;
  }
  factor_after_ = scale;
  if (is_average) divisor_after_ = num_ranks;
}

void C10dReduction::finish(const at::Tensor& output, const at::Tensor& reduced) const {
  NoAutograd guard;
  at::Tensor flat = output.detach().view({-1});
  if (flat.data_ptr() != reduced.data_ptr()) flat.copy_(reduced);
  if (divisor_after_ != 1) flat.div_(divisor_after_);
  if (factor_after_ != 1.0) flat.mul_(factor_after_);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, [tensor](void*) {},
      at::TensorOptions().dtype(at::kByte).device(tensor.device()));
}

}  // namespace libddp
