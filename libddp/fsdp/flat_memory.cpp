#include "libddp/fsdp/flat_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>

#include <utility>

namespace libddp {
namespace {

class MappedMemory final : public FlatMemory {
 public:
  MappedMemory(Spec spec, at::Tensor array)
      : FlatMemory(std::move(spec)), array_(std::move(array)) {
    mine_ = array_.narrow(0, spec_.block_numel * rank(), spec_.block_numel);
    mine_.zero_();
    own_block_ = computes_low() ? at::zeros({spec_.block_numel}, spec_.dtype) : mine_;
  }

  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const override {
    return array_.narrow(0, offset, c10::multiply_integers(sizes)).view(sizes);
  }
  void publish() override {
    if (!computes_low()) return;
    const c10::NoGradGuard no_grad;
    mine_.copy_(own_block_);
  }
  bool needs_meeting() const override { return world_size() > 1; }

 private:
  const at::Tensor array_;
  at::Tensor mine_;
};

class GatheredMemory final : public FlatMemory {
 public:
  GatheredMemory(Spec spec, std::shared_ptr<BufferPool> pool)
      : FlatMemory(std::move(spec)), pool_(std::move(pool)) {
    own_block_ = spec_.group->allocate({spec_.block_numel}, spec_.dtype).zero_();
    low_block_ = own_block_;
    if (computes_low()) {
      low_block_ = spec_.group->allocate({spec_.block_numel}, spec_.compute_dtype).zero_();
    }
    const auto bytes = static_cast<std::size_t>(numel()) * c10::elementSize(spec_.compute_dtype);
    storage_ = c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                            at::DataPtr(nullptr, c10::Device(c10::kCPU)), nullptr, false);
  }

  at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const override {
    std::vector<std::int64_t> strides(sizes.size(), 1);
    for (std::size_t d = sizes.size(); d > 1; --d) {
      strides[d - 2] = strides[d - 1] * std::max<std::int64_t>(1, sizes[d - 1]);
    }
    const c10::NoGradGuard no_grad;
    return at::empty({0}, spec_.compute_dtype).set_(storage_, offset, sizes, strides);
  }
  void publish() override {
    const c10::NoGradGuard no_grad;
    if (computes_low()) low_block_.copy_(own_block_);
  }
  bool needs_meeting() const override { return false; }

  void begin_unshard() override {
    if (buffer_.defined()) return;
    buffer_ = pool_->take(numel(), spec_.compute_dtype);
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
        at::DataPtr(buffer_.data_ptr(), c10::Device(c10::kCPU)));
    work_ =
        spec_.group->all_gather_into(buffer_, low_block_, {.async = true, .label = spec_.label});
  }
  void unshard() override {
    begin_unshard();
    if (!work_) return;
    const WorkPtr work = std::move(work_);
    work->wait();
  }
  void reshard() override {
    if (!buffer_.defined()) return;
    // A prefetch that nobody has used.
    if (const WorkPtr work = std::move(work_)) work->wait();
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
        at::DataPtr(nullptr, c10::Device(c10::kCPU)));
    pool_->give(std::move(buffer_));
    buffer_ = at::Tensor();
  }

 private:
  std::int64_t numel() const { return spec_.block_numel * world_size(); }

  const std::shared_ptr<BufferPool> pool_;
  at::Tensor low_block_;
  c10::Storage storage_;
  at::Tensor buffer_;
  WorkPtr work_;
};

}  // namespace

std::unique_ptr<FlatMemory> FlatMemory::make(Spec spec, std::shared_ptr<BufferPool> pool) {
  if (!spec.group || spec.group->size() == 1) {
    at::Tensor array = at::empty({spec.block_numel}, spec.compute_dtype);
    return std::make_unique<MappedMemory>(std::move(spec), std::move(array));
  }
  at::Tensor array = spec.group->allocate_shared({spec.block_numel * spec.group->size()},
                                                 spec.compute_dtype, {.label = spec.label});
  if (array.defined()) return std::make_unique<MappedMemory>(std::move(spec), std::move(array));
  return std::make_unique<GatheredMemory>(std::move(spec), std::move(pool));
}

}  // namespace libddp
