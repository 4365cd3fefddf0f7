#include "libddp/fsdp/flat_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "libddp/fsdp/device_memory.h"

namespace libddp {
namespace {

class MappedMemory final : public FlatMemory {
 public:
  MappedMemory(Spec spec, at::Tensor array)
      : FlatMemory(std::move(spec)), array_(std::move(array)) {
    if (computes_low()) make_own_block(at::zeros({spec_.layout.block_numel()}, spec_.dtype));
  }

  at::Tensor shard(std::size_t parameter) const override {
    return computes_low() ? shard_of_block(own_block(), parameter) : common_shard(parameter);
  }
  at::Tensor whole(std::size_t parameter) const override {
    const FlatLayout& layout = spec_.layout;
    return array_.narrow(0, layout.offset(parameter), layout.numel_of(parameter))
        .view(layout.shape(parameter));
  }
  void publish() override {
    if (!computes_low()) return;
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < spec_.layout.size(); ++i) common_shard(i).copy_(shard(i));
  }
  bool needs_barrier() const override { return world_size() > 1; }

 private:
  at::Tensor common_shard(std::size_t parameter) const {
    const FlatLayout::ShardSpec shard = spec_.layout.shard(parameter, rank());
    return array_.narrow(0, spec_.layout.offset(parameter) + shard.begin, shard.numel())
        .view(spec_.layout.shard_shape(parameter, rank()));
  }

  const at::Tensor array_;
};

/// Copies what the ranks' blocks have to its places in the whole array.
void put_together(const FlatLayout& layout, const at::Tensor& blocks, const at::Tensor& whole) {
  const std::size_t element = blocks.element_size();
  const auto* const from = static_cast<const std::byte*>(blocks.const_data_ptr());
  auto* const to = static_cast<std::byte*>(whole.data_ptr());
  for (std::size_t i = 0; i < layout.size(); ++i) {
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const FlatLayout::ShardSpec shard = layout.shard(i, rank);
      std::memcpy(to + static_cast<std::size_t>(layout.offset(i) + shard.begin) * element,
                  from + static_cast<std::size_t>(layout.shard_offset(i, rank)) * element,
                  static_cast<std::size_t>(shard.numel()) * element);
    }
  }
}

class GatheredMemory final : public FlatMemory {
 public:
  GatheredMemory(Spec spec, std::shared_ptr<BufferPool> pool)
      : FlatMemory(std::move(spec)),
        layout_(std::make_shared<const FlatLayout>(spec_.layout)),
        pool_(std::move(pool)) {
    make_own_block(allocate_block(spec_.dtype));
    low_block_ = computes_low() ? allocate_block(spec_.compute_dtype) : own_block();
    storage_ = borrowed_storage(spec_.layout.whole_numel());
  }

  at::Tensor shard(std::size_t parameter) const override {
    return shard_of_block(own_block(), parameter);
  }
  at::Tensor whole(std::size_t parameter) const override { return whole_in(storage_, parameter); }
  void publish() override {
    const c10::NoGradGuard no_grad;
    if (computes_low()) low_block_.copy_(own_block());
  }
  bool needs_barrier() const override { return false; }

  // Put together by the thread that gathers, beside the computation.
  void begin_unshard() override {
    if (whole_.defined()) return;
    // Of one size, which gradients have too, so that the pool hands one on as the other. The blocks
    // have the more padding.
    whole_ = pool_->take(spec_.layout.blocks_numel(), spec_.compute_dtype);
    blocks_ = pool_->take(spec_.layout.blocks_numel(), spec_.compute_dtype);
    work_ = spec_.group->all_gather_into(blocks_, low_block_, {.async = true, .label = label()});
    work_->on_complete([layout = layout_, blocks = blocks_, whole = whole_](Work& work) {
      if (!work.exception()) put_together(*layout, blocks, whole);
    });
    point(storage_, whole_.data_ptr());
  }
  void unshard() override {
    begin_unshard();
    if (!work_) return;
    const WorkPtr work = std::move(work_);
    const at::Tensor blocks = std::move(blocks_);
    work->wait();
    pool_->give(blocks);
  }
  bool is_in_memory() const override { return whole_.defined(); }
  void reshard() override {
    if (!whole_.defined()) return;
    // A prefetch that nobody has used.
    if (work_) unshard();
    point(storage_, nullptr);
    pool_->give(std::move(whole_));
    whole_ = at::Tensor();
  }

 private:
  at::Tensor allocate_block(at::ScalarType dtype) const {
    return spec_.group->allocate({spec_.layout.block_numel()}, dtype).zero_();
  }

  /// Of this object and of what is under way.
  const std::shared_ptr<const FlatLayout> layout_;
  const std::shared_ptr<BufferPool> pool_;
  at::Tensor low_block_;
  c10::Storage storage_;
  at::Tensor whole_;
  at::Tensor blocks_;
  WorkPtr work_;
};

}  // namespace

at::Tensor FlatMemory::shard_of_block(const at::Tensor& block, std::size_t parameter) const {
  const FlatLayout& layout = spec_.layout;
  return block.narrow(0, layout.shard_offset(parameter), layout.shard(parameter, rank()).numel())
      .view(layout.shard_shape(parameter, rank()));
}

c10::Storage FlatMemory::borrowed_storage(std::int64_t numel) const {
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(spec_.compute_dtype);
  return {c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, spec_.device), nullptr,
          /*resizable=*/false};
}

void FlatMemory::point(const c10::Storage& storage, void* memory) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(memory, storage.device()));
}

at::Tensor FlatMemory::whole_in(const c10::Storage& storage, std::size_t parameter) const {
  const FlatLayout::Shape& sizes = spec_.layout.shape(parameter);
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d > 1; --d) {
    strides[d - 2] = strides[d - 1] * std::max<std::int64_t>(1, sizes[d - 1]);
  }
  const c10::NoGradGuard no_grad;
  return at::empty({0}, at::TensorOptions().dtype(spec_.compute_dtype).device(spec_.device))
      .set_(storage, spec_.layout.offset(parameter), sizes, strides);
}

std::unique_ptr<FlatMemory> FlatMemory::make(Spec spec, std::shared_ptr<BufferPool> pool) {
  const std::int64_t numel = spec.layout.whole_numel();
  const bool is_alone = !spec.group || spec.group->size() == 1;
  const bool is_apart = !is_alone || spec.compute_dtype != spec.dtype || spec.home;
  if (!spec.device.is_cpu() && is_apart) {
    auto buffers = DeviceBuffers::of(spec.group, spec.device);
    return std::make_unique<DeviceMemory>(std::move(spec), std::move(buffers));
  }
  if (is_alone) {
    at::Tensor array =
        at::empty({numel}, at::TensorOptions().dtype(spec.compute_dtype).device(spec.device));
    return std::make_unique<MappedMemory>(std::move(spec), std::move(array));
  }
  at::Tensor array =
      spec.group->allocate_shared({numel}, spec.compute_dtype, {.label = spec.label});
  if (array.defined()) return std::make_unique<MappedMemory>(std::move(spec), std::move(array));
  return std::make_unique<GatheredMemory>(std::move(spec), std::move(pool));
}

}  // namespace libddp
