#pragma once

// Activation checkpointing for LibTorch: a block keeps its inputs and runs again in backward.
// Thread rule: see checkpoint_node.h.
//
//   at::Tensor y = libddp::checkpoint([b](at::Tensor h) mutable { return b->forward(h); },
//                                     b->parameters(), x);
//   at::Tensor z = libddp::checkpoint_sequential(blocks, 4, x);   // vector of module holders
//
// Gradients are those without checkpointing, to the bit, dropout included.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "libddp/activation/checkpoint_node.h"
#include "libddp/base/error.h"

namespace libddp {

struct CheckpointOptions {
  /// The second run draws the random numbers of the first.
  bool preserve_rng_state = true;
  /// For messages.
  std::string name = "a block";
};

namespace detail {

inline std::vector<at::Tensor> pack(at::Tensor tensor) { return {std::move(tensor)}; }
inline std::vector<at::Tensor> pack(std::vector<at::Tensor> tensors) { return tensors; }
template <typename... Tensors>
std::vector<at::Tensor> pack(const std::tuple<Tensors...>& tensors) {
  return std::apply([](const auto&... each) { return std::vector<at::Tensor>{each...}; }, tensors);
}

template <typename Result>
Result unpack(std::vector<at::Tensor> tensors) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return std::move(tensors.at(0));
  } else if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
    return tensors;
  } else {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return Result(std::move(tensors.at(I))...);
    }
    (std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

template <typename Function, std::size_t... I>
auto call(Function& function, const std::vector<at::Tensor>& inputs, std::index_sequence<I...>) {
  return function(inputs[I]...);
}

}  // namespace detail

/// function(inputs...): tensors in; a tensor, a vector or a tuple of tensors out.
/// `parameters`: everything else that the function uses and that requires a gradient; what is
/// missing there is an error in backward, never a lost gradient.
template <typename Function, typename... Inputs>
auto checkpoint(Function function, std::vector<at::Tensor> parameters,
                const CheckpointOptions& options, const Inputs&... inputs) {
  using Result = decltype(function(inputs...));
  using Places = std::make_index_sequence<sizeof...(Inputs)>;
  return detail::unpack<Result>(run_checkpointed(
      [function = std::move(function)](const std::vector<at::Tensor>& tensors) mutable {
        return detail::pack(detail::call(function, tensors, Places()));
      },
      {inputs...},
      {.parameters = std::move(parameters),
       .preserve_random = options.preserve_rng_state,
       .is_reentrant = false,
       .name = [name = options.name] { return name; }}));
}

template <typename Function, typename... Inputs>
auto checkpoint(Function function, std::vector<at::Tensor> parameters, const at::Tensor& input,
                const Inputs&... inputs) {
  return checkpoint(std::move(function), std::move(parameters), CheckpointOptions(), input,
                    inputs...);
}

/// The modules one after the other in `segments` groups; all but the last are checkpointed.
/// `modules`: holders or pointers of modules with forward(at::Tensor) and parameters().
template <typename Module>
at::Tensor checkpoint_sequential(const std::vector<Module>& modules, std::size_t segments,
                                 at::Tensor input, CheckpointOptions options = {}) {
  const std::size_t size = segments == 0 ? 0 : modules.size() / segments;
  if (size == 0) {
    throw ArgumentError("libddp: checkpoint_sequential: " + std::to_string(modules.size()) +
                        " modules do not make " + std::to_string(segments) +
                        " segments. Hint: at least one module per segment.");
  }
  const auto run = [](const std::vector<Module>& part, at::Tensor tensor) {
    // Copies: what a const holder shows has no forward, since that of torch's modules is not const.
    for (Module module : part) tensor = module->forward(tensor);
    return tensor;
  };
  for (std::size_t start = 0; start + size <= size * (segments - 1); start += size) {
    const std::vector<Module> part(modules.begin() + start, modules.begin() + start + size);
    std::vector<at::Tensor> parameters;
    for (const Module& module : part) {
      for (at::Tensor& parameter : module->parameters()) parameters.push_back(std::move(parameter));
    }
    options.name = "segment " + std::to_string(start) + ".." + std::to_string(start + size - 1);
    input = checkpoint([part, run](const at::Tensor& tensor) { return run(part, tensor); },
                       std::move(parameters), options, input);
  }
  return run({modules.begin() + size * (segments - 1), modules.end()}, std::move(input));
}

}  // namespace libddp
