#include "libddp/interop/convert.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <variant>

#include "libddp/base/printable.h"

namespace libddp {
namespace {

bool has_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kChar:
    case at::kByte:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kBool:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

}  // namespace

#ifdef C10D_BACKEND_HAS_RECONFIGURE
ReconfigureRequest reconfigure_request(const c10d::ReconfigureOptions& opts) {
  if (!opts.hints.empty()) {
    throw ArgumentError(fmt::format(
        "libddp reconfigure(uuid={}): hints has '{}', and libddp's backend knows none. Hint: pass "
        "no hints.",
        opts.uuid, printable(opts.hints.begin()->first)));
  }
  ReconfigureRequest request{.uuid = opts.uuid};
  std::visit([&](const auto& given) { request.handles.assign(given.begin(), given.end()); },
             opts.handles);
  request.is_ordered = std::holds_alternative<std::vector<std::string>>(opts.handles);
  return request;
}
#endif

CallOptions call_options(std::chrono::milliseconds timeout, bool async) {
  CallOptions options;
  options.async = async;
  if (timeout > std::chrono::milliseconds::zero()) options.timeout = timeout;
  return options;
}

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::Sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::Avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::Product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::Band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::Bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::Bxor;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  throw ArgumentError(
      fmt::format("libddp: unsupported reduction operation {}", static_cast<int>(op.op_)));
}

bool is_premultiplied(const c10d::ReduceOp& op) { return op.op_ == c10d::ReduceOp::PREMUL_SUM; }

void premultiply(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  const auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    throw ArgumentError("libddp: ReduceOp PREMUL_SUM came without its factor");
  }
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (supplement->tensor_factor.defined()) {
    at::Tensor(tensor).mul_(supplement->tensor_factor);
  } else {
    at::Tensor(tensor).mul_(supplement->double_factor);
  }
}

at::Tensor movable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || has_name(tensor.scalar_type()) ||
      tensor.is_conj() || tensor.is_quantized()) {
    return tensor;
  }
  return tensor.unsqueeze(-1).view(at::kByte);  // one more dimension: rows stay rows
}

std::vector<at::Tensor> movable(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) views.push_back(movable(tensor));
  return views;
}

at::Tensor shaped_like(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.sizes() == like.sizes()) return tensor;
  if (tensor.numel() != like.numel() || !tensor.is_contiguous()) return tensor;
  return tensor.view(like.sizes());
}

}  // namespace libddp
