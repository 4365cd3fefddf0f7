#pragma once

// FlatMemory on a device: this rank's shards as one block, and the whole array in a buffer of the
// pool while it is unsharded.
//
// NOTE [Nothing is copied]
// A parameter's place in the whole array is as long as world_size of its largest shards, and the
// shards of all ranks are gathered straight into it: the rows that torch.chunk gives to the ranks
// come to lie one behind the other. What does not divide evenly leaves unused elements behind the
// last row. So there is one all-gather for each parameter, all of a unit grouped to one operation,
// and neither before nor behind it a kernel that moves elements. With a lower precision for the
// computation the block is converted ahead of it, by one kernel.
//
// An offloaded block is copied to the device first: see NOTE [Offloading]. What follows is behind
// the copy in its stream, and not behind the computation.
//
// Buffers and collectives are ordered by streams only: see NOTE [Reuse of buffers]. The tensors
// that show the whole array, those that autograd saved among them, follow the buffer.
// Thread rule: as FlatMemory; any stream.
//
//   auto memory = std::make_unique<DeviceMemory>(spec, DeviceBuffers::of(group, device));

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "libddp/fsdp/device_buffers.h"
#include "libddp/fsdp/flat_memory.h"

namespace libddp {

class DeviceMemory final : public FlatMemory {
 public:
  DeviceMemory(Spec spec, std::shared_ptr<DeviceBuffers> pool);
  ~DeviceMemory() override;

  at::Tensor shard(std::size_t parameter) const override {
    return shard_of_block(own_block(), parameter);
  }
  at::Tensor whole(std::size_t parameter) const override { return whole_in(storage_, parameter); }
  void publish() override {}
  bool needs_barrier() const override { return false; }
  void begin_unshard() override;
  void unshard() override;
  bool is_in_memory() const override { return whole_.has_value(); }
  void note_use() override;
  void reshard() override;
  void finish_copies() override;

 private:
  /// A rank's part of each parameter with elements, as long as the largest, flat; and all ranks'.
  std::vector<at::Tensor> parts_of(const at::Tensor& block) const;
  std::vector<at::Tensor> places_in_whole() const;
  bool is_offloaded() const { return spec_.home.has_value(); }
  DeviceBuffer take(std::int64_t numel, at::ScalarType dtype);
  void take_whole();
  void give_whole();
  void fill();
  void gather();
  void convert();
  at::Tensor block_on_device();
  void give_block();

  const std::shared_ptr<DeviceBuffers> pool_;
  /// Of the whole array, and of the block as it travels where that is another one: memory of
  /// buffers.
  c10::Storage storage_;
  c10::Storage sent_storage_;
  std::vector<at::Tensor> sent_;
  std::vector<at::Tensor> gathered_;
  std::optional<DeviceBuffer> whole_;
  /// A copy of an offloaded block, and the block in a lower precision.
  std::optional<DeviceBuffer> copy_;
  std::optional<DeviceBuffer> low_;
  /// What has filled the buffer: a collective, or a kernel of a stream.
  WorkPtr work_;
  StreamUsers filled_in_;
};

}  // namespace libddp
