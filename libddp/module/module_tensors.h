#pragma once

// What a torch::nn::Module holds, and its inputs in another precision. Thread rule: pure functions.
//
//   NamedTensors parameters = named_parameters(*module);
//   module->forward(in_dtype(x, at::kBFloat16));

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

/// `module`, of which there must be one: an empty holder has none. `who`: for the ArgumentError.
template <typename Module>
std::shared_ptr<Module> required(std::shared_ptr<Module> module, const char* who) {
  if (module) return module;
  throw ArgumentError(std::string("libddp: ") + who +
                      ": the module is null. Hint: an empty module holder (nullptr) has none.");
}

/// With full names, once for each place where a tensor is registered, as LibTorch lists them.
inline NamedTensors registered_parameters(const torch::nn::Module& module) {
  NamedTensors found;
  for (const auto& item : module.named_parameters()) found.push_back({item.key(), item.value()});
  return found;
}
/// Each tensor once, under its first name, as Python's named_parameters() has them.
inline NamedTensors named_parameters(const torch::nn::Module& module) {
  NamedTensors found;
  std::unordered_set<const void*> known;
  for (NamedTensor& each : registered_parameters(module)) {
    if (known.insert(each.tensor.unsafeGetTensorImpl()).second) found.push_back(std::move(each));
  }
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
