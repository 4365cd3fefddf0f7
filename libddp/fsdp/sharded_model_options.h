#pragma once

// How a sharded model runs. Thread rule: plain data.
//
//   FullyShardedDataParallel model(net, {.shard = group}, {.forward_prefetch = false});

#include <exception>
#include <functional>
#include <memory>

namespace libddp {

class ParameterFaces;

struct ShardedModelOptions {
  /// Gather the next unit while one computes (where anything is gathered).
  bool forward_prefetch = true;
  bool backward_prefetch = true;
  /// Throws the given error; lets a language binding throw a type of its own out of backward().
  std::function<void(std::exception_ptr)> rethrow = nullptr;
  /// Null: scripts see the parameters.
  std::shared_ptr<ParameterFaces> faces = nullptr;
};

}  // namespace libddp
