#include "libddp/fsdp/flat_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

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
    const auto bytes = static_cast<std::size_t>(spec_.layout.whole_numel()) *
                       c10::elementSize(spec_.compute_dtype);
    storage_ = c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                            at::DataPtr(nullptr, c10::Device(c10::kCPU)), nullptr, false);
  }

  at::Tensor shard(std::size_t parameter) const override {
    return shard_of_block(own_block(), parameter);
  }
  at::Tensor whole(std::size_t parameter) const override {
    const FlatLayout::Shape& sizes = spec_.layout.shape(parameter);
    std::vector<std::int64_t> strides(sizes.size(), 1);
    for (std::size_t d = sizes.size(); d > 1; --d) {
      strides[d - 2] = strides[d - 1] * std::max<std::int64_t>(1, sizes[d - 1]);
    }
    const c10::NoGradGuard no_grad;
    return at::empty({0}, spec_.compute_dtype)
        .set_(storage_, spec_.layout.offset(parameter), sizes, strides);
  }
  void publish() override {
    const c10::NoGradGuard no_grad;
    if (computes_low()) low_block_.copy_(own_block());
  }
  bool needs_barrier() const override { return false; }

  // Put together by the thread that gathers, beside the computation.
  void begin_unshard() override {
    if (whole_.defined()) return;
    whole_ = pool_->take(spec_.layout.whole_numel(), spec_.compute_dtype);
    blocks_ = pool_->take(spec_.layout.blocks_numel(), spec_.compute_dtype);
    work_ = spec_.group->all_gather_into(blocks_, low_block_, {.async = true, .label = label()});
    work_->on_complete([layout = layout_, blocks = blocks_, whole = whole_](Work& work) {
      if (!work.exception()) put_together(*layout, blocks, whole);
    });
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
        at::DataPtr(whole_.data_ptr(), c10::Device(c10::kCPU)));
  }
  void unshard() override {
    begin_unshard();
    if (!work_) return;
    const WorkPtr work = std::move(work_);
    const at::Tensor blocks = std::move(blocks_);
    work->wait();
    pool_->give(blocks);
  }
  void reshard() override {
    if (!whole_.defined()) return;
    // A prefetch that nobody has used.
    if (work_) unshard();
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
        at::DataPtr(nullptr, c10::Device(c10::kCPU)));
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

std::unique_ptr<FlatMemory> FlatMemory::make(Spec spec, std::shared_ptr<BufferPool> pool) {
  const std::int64_t numel = spec.layout.whole_numel();
  if (!spec.group || spec.group->size() == 1) {
    at::Tensor array = at::empty({numel}, spec.compute_dtype);
    return std::make_unique<MappedMemory>(std::move(spec), std::move(array));
  }
  at::Tensor array =
      spec.group->allocate_shared({numel}, spec.compute_dtype, {.label = spec.label});
  if (array.defined()) return std::make_unique<MappedMemory>(std::move(spec), std::move(array));
  return std::make_unique<GatheredMemory>(std::move(spec), std::move(pool));
}

}  // namespace libddp
