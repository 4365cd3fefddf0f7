#pragma once

// LibTorch's parameters() has a tensor once for each place where it is registered (tied weights, a
// module under two names), Python's once. Thread rule: pure function.
//
//   each_once(net->parameters());

#include <ATen/core/Tensor.h>

#include <unordered_set>
#include <vector>

namespace libddp {

/// In the order of their first places.
inline std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> unique;
  std::unordered_set<const void*> known;
  for (const at::Tensor& tensor : tensors) {
    if (known.insert(tensor.unsafeGetTensorImpl()).second) unique.push_back(tensor);
  }
  return unique;
}

}  // namespace libddp
