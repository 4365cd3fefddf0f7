#include "libddp/interop/local_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "libddp/interop/convert.h"

namespace libddp {
namespace {

void combine(at::Tensor into, const at::Tensor& other, ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      into.add_(other);
      return;
    case ReduceOp::Product:
      into.mul_(other);
      return;
    case ReduceOp::Min:
      at::minimum_out(into, into, other);
      return;
    case ReduceOp::Max:
      at::maximum_out(into, into, other);
      return;
    case ReduceOp::Band:
      into.bitwise_and_(other);
      return;
    case ReduceOp::Bor:
      into.bitwise_or_(other);
      return;
    case ReduceOp::Bxor:
      into.bitwise_xor_(other);
      return;
  }
}

}  // namespace

void reduce_into_first(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  if (is_premultiplied(op)) {
    for (const at::Tensor& tensor : tensors) premultiply(op, tensor);
  }
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (std::size_t i = 1; i < tensors.size(); ++i) combine(tensors[0], tensors[i], reduce_op(op));
}

void copy_first_to_rest(const std::vector<at::Tensor>& tensors) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (std::size_t i = 1; i < tensors.size(); ++i) at::Tensor(tensors[i]).copy_(tensors[0]);
}

}  // namespace libddp
