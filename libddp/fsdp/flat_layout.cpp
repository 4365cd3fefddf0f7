#include "libddp/fsdp/flat_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace libddp {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::int64_t product(const FlatLayout::Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

}  // namespace

FlatLayout::FlatLayout(std::vector<Shape> shapes, int world_size, bool pads_chunks)
    : shapes_(std::move(shapes)), world_size_(world_size) {
  for (std::size_t i = 0; i < shapes_.size(); ++i) {
    numels_.push_back(product(shapes_[i]));
    offsets_.push_back(whole_numel_);
    const std::int64_t room = pads_chunks ? chunk_numel(i) * world_size : numels_[i];
    whole_numel_ += round_up(room, kAlignment);
    shard_offsets_.push_back(block_numel_);
    block_numel_ += round_up(chunk_numel(i), kAlignment);
  }
  notes_offset_ = block_numel_;
  block_numel_ += round_up(static_cast<std::int64_t>(size()), kAlignment);
  // Collectives and allocations of nothing would be a case of their own.
  whole_numel_ = std::max(whole_numel_, kAlignment);
  block_numel_ = std::max(block_numel_, kAlignment);
}

std::int64_t FlatLayout::num_rows(std::size_t parameter) const {
  return shapes_[parameter].empty() ? 1 : shapes_[parameter][0];
}

std::int64_t FlatLayout::first_row(std::size_t parameter, int rank) const {
  const std::int64_t rows = num_rows(parameter);
  const std::int64_t chunk = (rows + world_size_ - 1) / world_size_;
  return std::min(rows, chunk * rank);
}

FlatLayout::ShardSpec FlatLayout::shard(std::size_t parameter, int rank) const {
  const std::int64_t rows = num_rows(parameter);
  const std::int64_t row_numel = rows > 0 ? numels_[parameter] / rows : 0;
  return {first_row(parameter, rank) * row_numel, first_row(parameter, rank + 1) * row_numel};
}

FlatLayout::Shape FlatLayout::shard_shape(std::size_t parameter, int rank) const {
  Shape shape = shapes_[parameter].empty() ? Shape{1} : shapes_[parameter];
  shape[0] = first_row(parameter, rank + 1) - first_row(parameter, rank);
  return shape;
}

}  // namespace libddp
