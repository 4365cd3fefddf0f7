#include "libddp/base/reduce_op.h"

namespace libddp {

std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "SUM";
    case ReduceOp::Avg:
      return "AVG";
    case ReduceOp::Product:
      return "PRODUCT";
    case ReduceOp::Min:
      return "MIN";
    case ReduceOp::Max:
      return "MAX";
    case ReduceOp::Band:
      return "BAND";
    case ReduceOp::Bor:
      return "BOR";
    case ReduceOp::Bxor:
      return "BXOR";
  }
  return "unknown";
}

}  // namespace libddp
