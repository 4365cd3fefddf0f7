#include "libddp/snapshot/tensor_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "libddp/kernels/crc32c.h"

namespace libddp {

TensorSource::TensorSource(const OwnPieces& own, int rank, std::int64_t step)
    : layout_(PieceLayout::of(own.pieces())),
      tensors_(own.in_order_of(layout_)),
      name_(fmt::format("the tensors of rank {}, step {}", rank, step)),
      sums_(num_chunks(layout_.data_bytes())) {}

std::span<const std::byte> TensorSource::bytes_of(std::size_t piece) const {
  if (!host_ || on_host_ != piece) {
    host_.reset();
    host_ = std::make_unique<const HostBytes>(std::vector<at::Tensor>{tensors_[piece]});
    on_host_ = piece;
  }
  return host_->spans()[0];
}

std::span<const std::byte> TensorSource::chunk(std::size_t index,
                                               std::vector<std::byte>& scratch) const {
  const std::uint64_t begin = index * kChunkBytes;
  scratch.assign(chunk_bytes(layout_.data_bytes(), index), std::byte{0});
  const std::uint64_t end = begin + scratch.size();
  const auto& pieces = layout_.pieces();
  // By their place: the first that ends behind the chunk's beginning.
  auto piece = std::partition_point(pieces.begin(), pieces.end(), [&](const Piece& each) {
    return each.offset + each.bytes <= begin;
  });
  for (; piece != pieces.end() && piece->offset < end; ++piece) {
    if (piece->bytes == 0) continue;
    const std::uint64_t from = std::max(begin, piece->offset);
    const std::uint64_t to = std::min(end, piece->offset + piece->bytes);
    const auto bytes = bytes_of(static_cast<std::size_t>(piece - pieces.begin()));
    std::memcpy(scratch.data() + (from - begin), bytes.data() + (from - piece->offset), to - from);
  }
  sums_[index] = crc32c(scratch.data(), scratch.size());
  return scratch;
}

}  // namespace libddp
