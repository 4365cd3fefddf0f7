#pragma once

// Copies tensors of any dtype from one rank to all, many in one message.
//
// Tensors are packed as bytes into a staging buffer that the group communicates fastest; the buffer
// is kept for the next time. Thread rule: collective, one call at a time.
//
//   TensorBroadcaster broadcaster(group);
//   broadcaster.broadcast(module->buffers(), 0, "buffers");

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

class TensorBroadcaster {
 public:
  /// Largest message: staging memory stays bounded for a model of any size.
  static constexpr std::size_t kMaxMessageBytes = std::size_t{16} << 20;

  explicit TensorBroadcaster(Group group) : group_(std::move(group)) {}

  /// REQUIRES: the same shapes and dtypes on every rank.
  /// ENSURES: every rank holds the values of `root`, in the same tensors as before.
  void broadcast(const std::vector<at::Tensor>& tensors, int root, std::string_view label);

 private:
  at::Tensor staging(std::size_t bytes);
  void send(const std::vector<at::Tensor>& parts, std::size_t bytes, int root,
            std::string_view label);

  Group group_;
  at::Tensor staging_;
};

}  // namespace libddp
