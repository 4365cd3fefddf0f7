#pragma once

// What a torch::nn::Module holds, and its inputs in another precision. Thread rule: pure functions.
//
//   NamedTensors parameters = named_parameters(*module);
//   module->forward(in_dtype(x, at::kBFloat16));

#include <torch/nn/module.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "libddp/module/named_tensor.h"

namespace libddp {

/// With full names; LibTorch lists a tensor once for each place where it is registered.
inline NamedTensors named_parameters(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_parameters()) found.push_back({item.key(), item.value()});
  return found;
}
inline NamedTensors named_buffers(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_buffers()) found.push_back({item.key(), item.value()});
  return found;
}

/// With mixed precision, floating-point inputs are converted; anything else is passed on.
template <typename Argument>
decltype(auto) in_dtype(Argument&& argument, const std::optional<c10::ScalarType>& dtype) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Argument>, at::Tensor>) {
    const bool converts = dtype && argument.defined() && argument.is_floating_point();
    return converts ? argument.to(*dtype) : at::Tensor(std::forward<Argument>(argument));
  } else {
    return std::forward<Argument>(argument);
  }
}

}  // namespace libddp
