#include "libddp/fsdp/gradient_array.h"

#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "libddp/fsdp/plain_tensor.h"

namespace libddp {

GradientArray::GradientArray(const FlatSpec& spec, std::shared_ptr<BufferPool> pool)
    : spec_(spec),
      pool_(std::move(pool)),
      one_(at::ones({1}, spec.reduce_dtype)),
      filled_(spec.size()) {}

void GradientArray::begin() {
  tensor_ = pool_->take(spec_.layout.blocks_numel(), spec_.reduce_dtype);
  is_pools_ = true;
}

void GradientArray::begin_in(at::Tensor tensor) { tensor_ = std::move(tensor); }

void GradientArray::end() {
  if (std::exchange(is_pools_, false)) pool_->give(tensor_);
  tensor_ = at::Tensor();
  filled_.assign(filled_.size(), false);
}

void GradientArray::add(const at::Tensor& grad, std::size_t index) {
  const bool is_first = !filled_[index];
  filled_[index] = true;
  if (is_first && grad.scalar_type() == spec_.reduce_dtype && is_plain(grad)) {
    copy_bytes_in(grad, index);
    return;
  }
  const c10::NoGradGuard no_grad;
  const at::Tensor elements = grad.reshape(-1);
  for (int rank = 0; rank < spec_.layout.world_size(); ++rank) {
    const FlatLayout::ShardSpec shard = spec_.layout.shard(index, rank);
    const at::Tensor from = elements.narrow(0, shard.begin, shard.numel());
    const at::Tensor place = spec_.shard_in(tensor_, index, rank);
    is_first ? place.copy_(from) : place.add_(from);
  }
}

void GradientArray::copy_bytes_in(const at::Tensor& grad, std::size_t index) {
  const FlatLayout& layout = spec_.layout;
  const std::size_t element = grad.element_size();
  const auto* const from = static_cast<const std::byte*>(grad.const_data_ptr());
  auto* const array = static_cast<std::byte*>(tensor_.mutable_data_ptr());
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const FlatLayout::ShardSpec shard = layout.shard(index, rank);
    std::memcpy(array + static_cast<std::size_t>(layout.shard_offset(index, rank)) * element,
                from + static_cast<std::size_t>(shard.begin) * element,
                static_cast<std::size_t>(shard.numel()) * element);
  }
}

/// Between the shards too: padding counts in norms and sums.
void GradientArray::complete(bool notes_used) {
  const FlatLayout& layout = spec_.layout;
  auto* const bytes = static_cast<std::byte*>(tensor_.data_ptr());
  const std::size_t element = tensor_.element_size();
  std::int64_t end = 0;
  const auto clear_until = [&](std::int64_t to) {
    if (to <= end) return;
    std::memset(bytes + static_cast<std::size_t>(end) * element, 0,
                static_cast<std::size_t>(to - end) * element);
  };
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    for (std::size_t i = 0; i < spec_.size(); ++i) {
      if (!filled_[i]) continue;
      clear_until(layout.shard_offset(i, rank));
      end = layout.shard_offset(i, rank) + layout.shard(i, rank).numel();
    }
  }
  clear_until(layout.blocks_numel());
  if (notes_used) note_used();
}

/// Zero bytes, or not.
void GradientArray::note_used() {
  const std::size_t element = tensor_.element_size();
  auto* const bytes = static_cast<std::byte*>(tensor_.mutable_data_ptr());
  for (int rank = 0; rank < spec_.layout.world_size(); ++rank) {
    const std::int64_t begin = spec_.layout.block_numel() * rank + spec_.layout.notes_offset();
    for (std::size_t i = 0; i < spec_.size(); ++i) {
      std::byte* const note = bytes + (static_cast<std::size_t>(begin) + i) * element;
      if (filled_[i]) std::memcpy(note, one_.const_data_ptr(), element);
    }
  }
}

bool GradientArray::take_note(const at::Tensor& average, std::size_t index) const {
  const std::size_t element = average.element_size();
  auto* const notes = static_cast<std::byte*>(average.mutable_data_ptr()) +
                      static_cast<std::size_t>(spec_.layout.notes_offset()) * element;
  std::byte* const note = notes + index * element;
  const bool is_zero =
      std::all_of(note, note + element, [](std::byte byte) { return byte == std::byte{}; });
  std::memset(note, 0, element);
  return !is_zero;
}

}  // namespace libddp
