#pragma once

// A range of a tensor as a rank stores it. Thread rule: value.
//
//   Piece{.key = "model.wte.weight", .dtype = "F32", .shape = {50257, 768}, .begin = 0, .end =
//   1000}

#include <cstdint>
#include <string>
#include <vector>

namespace libddp {

struct Piece {
  std::string key;
  /// As stored_dtype.h names them.
  std::string dtype;
  /// Of the whole tensor.
  std::vector<std::int64_t> shape;
  /// Elements [begin, end) of the whole tensor in C order.
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Place among the bytes of the rank; PieceLayout sets it.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  bool operator==(const Piece&) const = default;
};

}  // namespace libddp
