#pragma once

// A parameter or a buffer with its full dotted name, as torch::nn::Module::named_parameters and
// Python's named_parameters() list them. Thread rule: plain data.
//
//   NamedTensor weight{"transformer.h.0.attn.weight", tensor};

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace libddp {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

using NamedTensors = std::vector<NamedTensor>;

}  // namespace libddp
