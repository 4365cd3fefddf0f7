#pragma once

// Where parameters lie in one flat array that the ranks own in equal blocks.
//
// Words: the array has `world_size` blocks of `block_numel` elements, block r is rank r's; a
// *piece* is the part of a parameter that lies in one block; a *row* is an element of dim 0 with
// all that is under it. Parameters stand in their order, each contiguous, so that a parameter is a
// view of the array and a block is what a collective moves: nothing is copied between the two. A
// parameter is cut between two rows wherever padding can bring that about, so that a piece is a
// plain tensor with the parameter's number of dimensions. It cannot where one parameter fills whole
// blocks and its rows don't divide them: such a piece is shown as [numel, 1, ...]. Pure: no
// tensors, no processes. Thread rule: immutable after construction.
//
//   FlatLayout layout({{10, 5}, {5}}, 2);
//   layout.offset(1);        // where parameter 1 begins in the array
//   layout.piece(0, 1);      // elements of parameter 0 in block 1, e.g. [25, 50)

#include <cstddef>
#include <cstdint>
#include <vector>

namespace libddp {

class FlatLayout {
 public:
  using Shape = std::vector<std::int64_t>;
  /// Elements [begin, end) of a parameter.
  struct Piece {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t numel() const { return end - begin; }
  };

  /// Blocks and, where it costs nothing, parameters start at multiples of this.
  static constexpr std::int64_t kAlignment = 32;

  /// REQUIRES: world_size >= 1. Shapes may hold zeros; [] is a scalar.
  FlatLayout(std::vector<Shape> shapes, int world_size);

  std::size_t size() const { return shapes_.size(); }
  int world_size() const { return world_size_; }
  std::int64_t block_numel() const { return block_numel_; }
  /// Of the whole array, padding included.
  std::int64_t numel() const { return block_numel_ * world_size_; }
  const Shape& shape(std::size_t parameter) const { return shapes_[parameter]; }
  std::int64_t numel_of(std::size_t parameter) const { return numels_[parameter]; }
  std::int64_t offset(std::size_t parameter) const { return offsets_[parameter]; }

  Piece piece(std::size_t parameter, int rank) const;
  /// [rows, ...] where the piece is whole rows, else [numel, 1, ...]; [1] or [0] for a scalar.
  Shape piece_shape(std::size_t parameter, int rank) const;
  bool is_whole_rows(std::size_t parameter, int rank) const;
  /// Where the piece begins in block `rank`; 0 for an empty one.
  std::int64_t piece_offset(std::size_t parameter, int rank) const;

 private:
  bool place_all();
  std::int64_t place(std::size_t parameter, std::int64_t from) const;
  std::int64_t row_numel(std::size_t parameter) const;

  std::vector<Shape> shapes_;
  std::vector<std::int64_t> numels_;
  int world_size_;
  std::int64_t block_numel_ = 0;
  std::vector<std::int64_t> offsets_;
};

}  // namespace libddp
