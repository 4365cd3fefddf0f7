#include "libddp/snapshot/tensor_source.h"

#include <fmt/format.h>

namespace libddp {

TensorSource::TensorSource(const OwnPieces& own, int rank, std::int64_t step)
    : layout_(PieceLayout::of(own.pieces())),
      tensors_(own.in_order_of(layout_)),
      name_(fmt::format("the tensors of rank {}, step {}", rank, step)),
      sums_(num_chunks(layout_.data_bytes())) {}

std::span<const std::byte> TensorSource::chunk(std::size_t index,
                                               std::vector<std::byte>& scratch) const {
  if (!chunks_ || index != next_) {
    chunks_.reset();
    chunks_ = std::make_unique<StagedChunks>(tensors_, index);
  }
  next_ = index + 1;
  scratch.resize(chunk_bytes(layout_.data_bytes(), index));
  sums_[index] = chunks_->copy(index, scratch.data());
  return scratch;
}

}  // namespace libddp
