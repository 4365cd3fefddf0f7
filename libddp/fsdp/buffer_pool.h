#pragma once

// Flat buffers that the units of a model use in turns: gradients before they are reduced,
// parameters that were gathered. They lie where the group communicates fastest. Thread rule: one
// thread at a time.
//
//   at::Tensor buffer = pool.take(layout.numel(), at::kFloat);   // uninitialised
//   pool.give(std::move(buffer));

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

class BufferPool {
 public:
  /// The one that all units of a group share; it ends with the last of them. Units that no group
  /// shards share that of `ranks`, the group that they average over: ranks may be threads of one
  /// process, which must not meet in a pool. Without either, one of its own.
  static std::shared_ptr<BufferPool> of(const Group& group, const Group& ranks = nullptr);

  /// `group` null: ordinary memory.
  explicit BufferPool(Group group) : group_(std::move(group)) {}

  at::Tensor take(std::int64_t numel, at::ScalarType dtype);
  void give(at::Tensor buffer);

 private:
  Group group_;
  std::vector<at::Tensor> free_;
};

}  // namespace libddp
