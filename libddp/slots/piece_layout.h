#pragma once

// Where the pieces of a rank lie among its bytes, in memory and in files alike. As text it is the
// header of a safetensors file, so that the text, its length before it and the bytes behind it are
// one: dtype, shape and place of each piece by its key, and under "__metadata__" what safetensors
// has no word for, the whole tensor of a piece that is a part of one.
//
// Pieces with large elements come first, so that each is aligned without a gap; otherwise they keep
// their order. Thread rule: immutable.
//
//   const PieceLayout layout = PieceLayout::of({{.key = "w", .dtype = "F32", .shape = {4},
//                                                .begin = 0, .end = 4}});
//   layout.text();          // {"__metadata__":{...},"w":{"dtype":"F32","shape":[4],...}}
//   layout.data_bytes();    // 16

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "libddp/slots/piece.h"

namespace libddp {

class PieceLayout {
 public:
  /// Of a file or a slot; more is refused before it is read.
  static constexpr std::uint64_t kMaxTextBytes = 100u << 20;

  PieceLayout() = default;
  /// Throws ArgumentError for a key that comes twice or is safetensors's own, an unknown dtype, a
  /// negative size, a range outside of the tensor, or more bytes than 64 bits count.
  static PieceLayout of(std::vector<Piece> pieces);
  /// Throws SnapshotError with a clause about what is wrong, which callers complete with where.
  static PieceLayout parse(std::string_view text);

  const std::string& text() const { return text_; }
  /// By offset, without gaps.
  const std::vector<Piece>& pieces() const { return pieces_; }
  std::uint64_t data_bytes() const { return data_bytes_; }
  /// Null if there is none of that key.
  const Piece* find(const std::string& key) const;
  /// The keys of the pieces that have bytes in [begin, end), with the offsets there; for messages.
  std::string describe(std::uint64_t begin, std::uint64_t end) const;

 private:
  std::string first_double() const;
  void place();
  void index();

  std::vector<Piece> pieces_;
  std::unordered_map<std::string, std::size_t> by_key_;
  std::uint64_t data_bytes_ = 0;
  std::string text_;
};

/// Elements of a tensor of that shape; -1 for a negative size or more than 63 bits count.
std::int64_t numel_of(const std::vector<std::int64_t>& shape);

}  // namespace libddp
