#pragma once

// Copies tensors of any dtype from one rank to all, many in one message.
//
// Tensors are packed as bytes into a staging buffer that the group communicates fastest; the buffer
// is kept for the next time. On a device all that happens in the order of the current stream, with
// one launch for each way; where tensors are on several devices, each device has its messages.
// Thread rule: collective, one call at a time.
//
//   TensorBroadcaster broadcaster(group);
//   broadcaster.broadcast(module->buffers(), 0, "buffers");

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

class TensorBroadcaster {
 public:
  /// Largest message: large enough for the bandwidth of any transport, small enough to stay in a
  /// cache from packing to unpacking, and to fault in few pages of fresh staging memory.
  static constexpr std::size_t kMaxMessageBytes = std::size_t{4} << 20;

  explicit TensorBroadcaster(Group group) : group_(std::move(group)) {}

  /// REQUIRES: the same shapes, dtypes and kinds of device on every rank.
  /// ENSURES: every rank holds the values of `root`, in the same tensors as before.
  void broadcast(const std::vector<at::Tensor>& tensors, int root, std::string_view label);

 private:
  void broadcast_on(c10::Device device, const std::vector<at::Tensor>& tensors, int root,
                    std::string_view label);
  at::Tensor staging(std::size_t bytes, c10::Device device);
  void send(const std::vector<at::Tensor>& parts, std::size_t bytes, int root,
            std::string_view label);

  Group group_;
  std::unordered_map<c10::Device, at::Tensor> staging_;
};

}  // namespace libddp
