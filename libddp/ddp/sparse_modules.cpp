#include "libddp/ddp/sparse_modules.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>

namespace libddp {
namespace {

/// Undefined where the module is no such one.
at::Tensor sparse_weight(const torch::nn::Module& module) {
  const auto* const embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module);
  if (embedding != nullptr && embedding->options.sparse()) return embedding->weight;
  const auto* const bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module);
  if (bag != nullptr && bag->options.sparse()) return bag->weight;
  return {};
}

}  // namespace

std::vector<std::string> sparse_parameters(const torch::nn::Module& module,
                                           const NamedTensors& parameters) {
  std::vector<at::Tensor> weights = {sparse_weight(module)};
  for (const auto& child : module.modules(/*include_self=*/false)) {
    weights.push_back(sparse_weight(*child));
  }
  std::vector<std::string> names;
  for (const NamedTensor& parameter : parameters) {
    const auto is_weight = [&](const at::Tensor& weight) {
      return parameter.tensor.is_same(weight);
    };
    if (std::any_of(weights.begin(), weights.end(), is_weight)) names.push_back(parameter.name);
  }
  return names;
}

}  // namespace libddp
