#include "libddp/group/expanded.h"

#include <cstdint>

namespace libddp {

at::Tensor without_repeats(at::Tensor values, const at::Tensor& tensor) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) values = values.narrow(dim, 0, 1);
  }
  return values;
}

}  // namespace libddp
