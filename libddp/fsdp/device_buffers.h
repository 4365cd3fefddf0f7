#pragma once

// Flat buffers on a device that the units of a model use in turns: as many as are in use at a time,
// whatever the number of units. They lie in memory that the group communicates fastest, and stay.
//
// NOTE [Reuse of buffers]
// Who takes a buffer comes behind all streams that have used it: in one stream that is its order,
// so nothing is waited for. A collective that fills it waits for the stream that it is called in.
// Thread rule: one thread at a time.
//
//   DeviceBuffer buffer = pool->take(numel, at::kBFloat16);
//   at::Tensor array = buffer.as(numel, at::kBFloat16);   // uninitialised
//   buffer.users.add_current();
//   pool->give(std::move(buffer));

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "libddp/fsdp/host_copies.h"
#include "libddp/fsdp/stream_users.h"
#include "libddp/group/process_group.h"

namespace libddp {

/// Memory, and who uses it.
struct DeviceBuffer {
  DeviceBuffer(at::Tensor memory, c10::Device device)
      : bytes(std::move(memory)), users(device), home(current_stream_on(device)) {}
  DeviceBuffer(DeviceBuffer&&) = default;
  DeviceBuffer& operator=(DeviceBuffer&&) = default;
  /// The allocator gives the memory to `home`, which must come behind its users.
  ~DeviceBuffer();

  at::Tensor as(std::int64_t numel, at::ScalarType dtype) const;

  at::Tensor bytes;
  StreamUsers users;
  /// That it was allocated in.
  c10::Stream home;
};

class DeviceBuffers {
 public:
  /// The one that all units of a group share on a device; it ends with the last of them.
  static std::shared_ptr<DeviceBuffers> of(const Group& group, c10::Device device);

  /// `group` null: ordinary memory.
  DeviceBuffers(Group group, c10::Device device) : group_(std::move(group)), device_(device) {}

  /// In the order of the current stream. Throws c10::OutOfMemoryError.
  DeviceBuffer take(std::int64_t numel, at::ScalarType dtype);
  void give(DeviceBuffer buffer) { free_.push_back(std::move(buffer)); }
  /// For what is offloaded.
  HostCopies& host_copies();

 private:
  at::Tensor allocate(std::int64_t bytes) const;

  const Group group_;
  const c10::Device device_;
  std::vector<DeviceBuffer> free_;
  std::optional<HostCopies> host_copies_;
};

}  // namespace libddp
