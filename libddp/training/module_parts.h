#pragma once

// What this rank has of the tensors of a torch::nn::Module, by name: all of them, or its part of
// the parameters of sharded units. Thread rule: values.
//
//   const ModuleParts parts = ModuleParts::of(*net);
//   parts.tensors[0].name;   // "blocks.0.weight"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace libddp {

struct ModulePart {
  std::string name;
  at::Tensor tensor;
  /// Of the whole tensor, of which `tensor` is elements [begin, end).
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Other ranks have others.
  bool is_sharded = false;
  /// Buffers may differ between ranks; parameters without other parts do not.
  bool is_buffer = false;
};

struct ModuleParts {
  /// Throws StateError for sharded units that have left their group.
  static ModuleParts of(const torch::nn::Module& module);

  /// Each once, parameters first.
  std::vector<ModulePart> tensors;
  /// Further name of a tensor that is registered more than once -> its first one.
  std::map<std::string, std::string> aliases;
  /// TensorImpl -> its place in `tensors`.
  std::unordered_map<const void*, std::size_t> places;
};

}  // namespace libddp
