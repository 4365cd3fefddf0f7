#pragma once

// Tensors that are expanded (torch.Tensor.expand): several of their elements are one in memory, and
// torch refuses to write them.
// Thread rule: free functions.
//
//   without_repeats(mask, mask).copy_(without_repeats(values, mask));

#include <ATen/core/Tensor.h>

namespace libddp {

/// A view of `values`, which has the shape of `tensor`: of elements that are one in the memory of
/// `tensor`, the first. `values` itself where none are.
at::Tensor without_repeats(at::Tensor values, const at::Tensor& tensor);

}  // namespace libddp
