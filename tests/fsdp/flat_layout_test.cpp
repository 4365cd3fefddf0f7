// The flat layout: pure numbers.

#include "libddp/fsdp/flat_layout.h"

#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/catch.h"

namespace libddp {
namespace {

using Shape = FlatLayout::Shape;

/// What holds for every layout, whatever the shapes.
void check_layout(const FlatLayout& layout) {
  std::int64_t end = 0;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    CHECK(layout.offset(i) >= end);
    end = layout.offset(i) + layout.numel_of(i);
    std::int64_t covered = 0;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const FlatLayout::Piece piece = layout.piece(i, rank);
      if (piece.numel() == 0) continue;
      CHECK(piece.begin == covered);
      covered = piece.end;
      CHECK(layout.piece_offset(i, rank) >= 0);
      CHECK(layout.piece_offset(i, rank) + piece.numel() <= layout.block_numel());
      const Shape shape = layout.piece_shape(i, rank);
      CHECK(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()) ==
            piece.numel());
      CHECK(shape.size() == std::max<std::size_t>(1, layout.shape(i).size()));
    }
    CHECK(covered == layout.numel_of(i));
  }
  CHECK(end <= layout.numel());
  CHECK(layout.block_numel() % FlatLayout::kAlignment == 0);
}

}  // namespace

TEST_CASE("one rank owns everything", "[flat_layout]") {
  const FlatLayout layout({{10, 5}, {5}, {}}, 1);
  check_layout(layout);
  CHECK(layout.piece_shape(0, 0) == Shape{10, 5});
  CHECK(layout.piece_shape(2, 0) == Shape{1});
}

TEST_CASE("a parameter is cut between rows", "[flat_layout]") {
  for (const int world_size : {2, 3, 4, 7}) {
    // A transformer block of width 192.
    const FlatLayout layout({{192},
                             {192},
                             {576, 192},
                             {576},
                             {192, 192},
                             {192},
                             {192},
                             {192},
                             {768, 192},
                             {768},
                             {192, 768},
                             {192}},
                            world_size);
    check_layout(layout);
    for (std::size_t i = 0; i < layout.size(); ++i) {
      for (int rank = 0; rank < world_size; ++rank) CHECK(layout.is_whole_rows(i, rank));
    }
    std::int64_t used = 0;
    for (std::size_t i = 0; i < layout.size(); ++i) used += layout.numel_of(i);
    CHECK(layout.numel() - used < world_size * (768 + 2 * FlatLayout::kAlignment) + 12 * 32);
  }
}

TEST_CASE("a parameter of many blocks is cut between rows where its rows are short",
          "[flat_layout]") {
  const FlatLayout layout({{1000, 24}, {7}}, 5);
  check_layout(layout);
  for (int rank = 0; rank < 5; ++rank) CHECK(layout.is_whole_rows(0, rank));
}

TEST_CASE("rows longer than a block are shown flat, with as many dimensions", "[flat_layout]") {
  const FlatLayout layout({{1, 1000, 1}}, 4);
  check_layout(layout);
  CHECK_FALSE(layout.is_whole_rows(0, 1));
  CHECK(layout.piece_shape(0, 1) == Shape{layout.piece(0, 1).numel(), 1, 1});
}

TEST_CASE("empty parameters and fewer elements than ranks", "[flat_layout]") {
  const FlatLayout layout({{0, 4}, {3}, {0}}, 5);
  check_layout(layout);
  CHECK(layout.piece_shape(0, 0) == Shape{0, 4});
  CHECK(layout.piece_shape(0, 3) == Shape{0, 4});
  CHECK(layout.piece_shape(1, 4) == Shape{0});
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
