#pragma once

// Finds the parameters that torch's own modules give sparse gradients: weights of Embedding and
// EmbeddingBag with sparse(true).
// Thread rule: free function.
//
//   std::vector<std::string> names = sparse_parameters(*module, named_parameters(*module));

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "libddp/module/named_tensor.h"

namespace libddp {

/// Their names in `parameters`; a weight that several modules share counts for each of them.
std::vector<std::string> sparse_parameters(const torch::nn::Module& module,
                                           const NamedTensors& parameters);

}  // namespace libddp
