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

std::int64_t product(const FlatLayout::Shape& shape, std::size_t from) {
  return std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(std::min(from, shape.size())),
                         shape.end(), std::int64_t{1}, std::multiplies<>());
}

}  // namespace

FlatLayout::FlatLayout(std::vector<Shape> shapes, int world_size)
    : shapes_(std::move(shapes)), world_size_(world_size), offsets_(shapes_.size()) {
  std::int64_t total = 0;
  for (const Shape& shape : shapes_) {
    numels_.push_back(product(shape, 0));
    total += numels_.back();
  }
  // A parameter larger than a block is cut at several edges: blocks of whole rows suit them all.
  const std::int64_t fair = round_up((total + world_size - 1) / world_size, kAlignment);
  std::int64_t unit = kAlignment;
  for (std::size_t i = 0; i < shapes_.size(); ++i) {
    if (numels_[i] <= fair) continue;
    const std::int64_t both = std::lcm(unit, row_numel(i));
    if (both <= fair / 8) unit = both;
  }
  block_numel_ = std::max(unit, round_up(fair, unit));
  // Each round adds what padding took: a row per edge at most, so it ends.
  while (!place_all()) block_numel_ += unit;
}

std::int64_t FlatLayout::row_numel(std::size_t parameter) const {
  return std::max<std::int64_t>(1, product(shapes_[parameter], 1));
}

bool FlatLayout::place_all() {
  std::int64_t next = 0;
  for (std::size_t i = 0; i < shapes_.size(); ++i) {
    offsets_[i] = place(i, next);
    next = offsets_[i] + numels_[i];
  }
  return next <= numel();
}

/// The first good place at `from` or behind it.
std::int64_t FlatLayout::place(std::size_t parameter, std::int64_t from) const {
  const std::int64_t numel = numels_[parameter];
  const std::int64_t aligned = round_up(from, kAlignment);
  const auto edge_after = [&](std::int64_t at) { return (at / block_numel_ + 1) * block_numel_; };
  if (aligned + numel <= edge_after(aligned)) return aligned;
  // The first edge falls between rows if the distance to it is a number of rows. Only where blocks
  // are whole rows too, further edges do.
  const std::int64_t edge = edge_after(from);
  if (from + numel <= edge) return from;
  return from + (edge - from) % row_numel(parameter);
}

FlatLayout::Piece FlatLayout::piece(std::size_t parameter, int rank) const {
  const std::int64_t start = offsets_[parameter];
  const std::int64_t block = block_numel_ * rank;
  const std::int64_t begin = std::clamp<std::int64_t>(block - start, 0, numels_[parameter]);
  const std::int64_t end =
      std::clamp<std::int64_t>(block + block_numel_ - start, 0, numels_[parameter]);
  return {begin, end};
}

bool FlatLayout::is_whole_rows(std::size_t parameter, int rank) const {
  const Piece part = piece(parameter, rank);
  const std::int64_t row = row_numel(parameter);
  return part.begin % row == 0 && part.end % row == 0;
}

FlatLayout::Shape FlatLayout::piece_shape(std::size_t parameter, int rank) const {
  const Piece part = piece(parameter, rank);
  if (shapes_[parameter].empty()) return {part.numel()};
  Shape shape = shapes_[parameter];
  if (is_whole_rows(parameter, rank)) {
    shape[0] = part.numel() / row_numel(parameter);
    if (numels_[parameter] == 0) shape = shapes_[parameter];
    return shape;
  }
  std::fill(shape.begin(), shape.end(), 1);
  shape[0] = part.numel();
  return shape;
}

std::int64_t FlatLayout::piece_offset(std::size_t parameter, int rank) const {
  const Piece part = piece(parameter, rank);
  if (part.numel() == 0) return 0;
  return offsets_[parameter] + part.begin - block_numel_ * rank;
}

}  // namespace libddp
