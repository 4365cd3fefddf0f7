// The flat layout: pure numbers, against torch.chunk.

#include "libddp/fsdp/flat_layout.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace libddp {
namespace {

using Shape = FlatLayout::Shape;

/// What the parameter's rank-th chunk is, or the empty one that chunk() leaves out.
void check_is_chunk(const FlatLayout& layout, std::size_t i, int rank) {
  Shape shape = layout.shape(i).empty() ? Shape{1} : layout.shape(i);
  const at::Tensor whole = at::arange(layout.numel_of(i)).view(shape);
  const auto chunks = whole.chunk(layout.world_size());
  const FlatLayout::ShardSpec shard = layout.shard(i, rank);
  const Shape own = layout.shard_shape(i, rank);
  if (static_cast<std::size_t>(rank) >= chunks.size()) {
    shape[0] = 0;
    CHECK(own == shape);
    CHECK(shard.numel() == 0);
    return;
  }
  const at::Tensor& chunk = chunks[static_cast<std::size_t>(rank)];
  CHECK(chunk.sizes() == at::IntArrayRef(own));
  REQUIRE(chunk.numel() == shard.numel());
  if (shard.numel() > 0) CHECK(chunk.data_ptr<std::int64_t>()[0] == shard.begin);
}

/// What holds for every layout, whatever the shapes.
void check_layout(const FlatLayout& layout) {
  std::int64_t end = 0;
  std::int64_t block_end = 0;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    CHECK(layout.offset(i) >= end);
    CHECK(layout.offset(i) % FlatLayout::kAlignment == 0);
    end = layout.offset(i) + layout.numel_of(i);
    CHECK(layout.shard_offset(i) >= block_end);
    CHECK(layout.shard_offset(i) % FlatLayout::kAlignment == 0);
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      check_is_chunk(layout, i, rank);
      block_end = std::max(block_end, layout.shard_offset(i) + layout.shard(i, rank).numel());
      CHECK(layout.shard_offset(i, rank) == layout.shard_offset(i) + rank * layout.block_numel());
    }
  }
  CHECK(end <= layout.whole_numel());
  CHECK(block_end <= layout.notes_offset());
  const auto num_notes = static_cast<std::int64_t>(layout.size());
  CHECK(layout.notes_offset() + num_notes <= layout.block_numel());
  CHECK(layout.block_numel() % FlatLayout::kAlignment == 0);
  CHECK(layout.blocks_numel() == layout.block_numel() * layout.world_size());
}

}  // namespace

TEST_CASE("one rank owns everything, in one order", "[flat_layout]") {
  const FlatLayout layout({{10, 5}, {5}, {}}, 1);
  check_layout(layout);
  CHECK(layout.shard_shape(0, 0) == Shape{10, 5});
  CHECK(layout.shard_shape(2, 0) == Shape{1});
  CHECK(layout.notes_offset() == layout.whole_numel());
  for (std::size_t i = 0; i < layout.size(); ++i) CHECK(layout.shard_offset(i) == layout.offset(i));
}

TEST_CASE("a rank owns a chunk of each parameter's rows", "[flat_layout]") {
  const FlatLayout layout({{192}, {576, 192}, {768, 192}, {7, 3}}, 4);
  check_layout(layout);
  CHECK(layout.shard_shape(1, 3) == Shape{144, 192});
  CHECK(layout.shard(1, 3).begin == 3 * 144 * 192);
  CHECK(layout.shard_shape(3, 3) == Shape{1, 3});
}

TEST_CASE("fewer rows than ranks", "[flat_layout]") {
  const FlatLayout layout({{1, 1000, 1}, {4}, {}}, 3);
  check_layout(layout);
  CHECK(layout.shard_shape(0, 0) == Shape{1, 1000, 1});
  CHECK(layout.shard_shape(0, 1) == Shape{0, 1000, 1});
  CHECK(layout.shard_shape(1, 1) == Shape{2});
  CHECK(layout.shard_shape(1, 2) == Shape{0});
  CHECK(layout.shard_shape(2, 0) == Shape{1});
  CHECK(layout.shard_shape(2, 2) == Shape{0});
}

TEST_CASE("empty parameters, and none", "[flat_layout]") {
  const FlatLayout layout({{0, 4}, {3, 0}, {0}}, 5);
  check_layout(layout);
  CHECK(layout.shard_shape(0, 0) == Shape{0, 4});
  CHECK(layout.shard_shape(1, 2) == Shape{1, 0});
  check_layout(FlatLayout({}, 3));
}

TEST_CASE("any shapes on any number of ranks", "[flat_layout]") {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<std::int64_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    std::vector<Shape> shapes;
    for (std::int64_t i = below(12); i >= 0; --i) {
      Shape shape;
      for (std::int64_t d = below(4); d > 0; --d) shape.push_back(below(round % 2 ? 9 : 70));
      shapes.push_back(std::move(shape));
    }
    check_layout(FlatLayout(std::move(shapes), 1 + static_cast<int>(below(9))));
  }
}

}  // namespace libddp
