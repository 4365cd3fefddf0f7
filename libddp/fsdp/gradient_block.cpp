#include "libddp/fsdp/gradient_block.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

#include "libddp/fsdp/plain_tensor.h"

namespace libddp {
namespace {

/// Whether they are the same elements in the same order.
bool shows_same(const at::Tensor& left, const at::Tensor& right) {
  return left.layout() == at::kStrided && left.const_data_ptr() == right.const_data_ptr() &&
         left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         left.strides() == right.strides();
}

/// All of the memory that `part` shows some of, if it has this many elements; else undefined.
at::Tensor whole_storage(const at::Tensor& part, std::int64_t numel, at::ScalarType dtype) {
  if (!part.defined() || part.scalar_type() != dtype || !is_plain(part)) return {};
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  if (part.storage().nbytes() != bytes) return {};
  at::Tensor whole = part.variable_data();
  const std::int64_t stride = 1;
  whole.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(numel),
                                                     at::IntArrayRef(stride), 0);
  return whole;
}

}  // namespace

GradientBlock::GradientBlock(const FlatSpec& spec) : spec_(spec) {
  for (std::size_t i = 0; i < spec.size(); ++i) {
    shapes_.push_back(spec.layout.shard_shape(i, spec.rank()));
  }
}

void GradientBlock::begin(bool is_overwritten) {
  if (tensor_.defined()) return;
  const std::int64_t numel = spec_.layout.block_numel();
  if (is_overwritten) {
    tensor_ = at::empty({numel}, spec_.home_options(spec_.gradient_dtype));
    return;
  }
  const Group replicate = spec_.is_sharded() ? nullptr : spec_.options.replicate;
  tensor_ = replicate ? replicate->allocate({numel}, spec_.gradient_dtype).zero_()
                      : at::zeros({numel}, spec_.gradient_dtype);
}

/// Not a view in autograd's sense: LibTorch's optimizers detach gradients in place, which views
/// refuse. Made in each step, so without the dispatcher.
at::Tensor GradientBlock::shard(std::size_t index) const {
  at::Tensor made = tensor_.variable_data();
  c10::TensorImpl& impl = *made.unsafeGetTensorImpl();
  impl.set_storage_offset(spec_.layout.shard_offset(index));
  impl.set_sizes_contiguous(shapes_[index]);
  return made;
}

void GradientBlock::note_shown() { shown_.emplace(tensor_.storage().getWeakStorageImpl()); }

void GradientBlock::release() {
  if (spec_.is_sharded() || spec_.is_on_device()) tensor_ = at::Tensor();
}

void GradientBlock::leave_to_keepers() {
  if (tensor_.defined() && tensor_.storage().use_count() > 1) tensor_ = at::Tensor();
}

at::Tensor GradientBlock::block_of(const std::vector<at::Tensor>& shards) const {
  const at::Tensor block =
      tensor_.defined()
          ? tensor_
          : whole_storage(shards.front(), spec_.layout.block_numel(), spec_.gradient_dtype);
  for (std::size_t i = 0; block.defined() && i < shards.size(); ++i) {
    if (!shards[i].defined() || !shows_same(shards[i], spec_.shard_of(block, i))) return {};
  }
  return block;
}

}  // namespace libddp
