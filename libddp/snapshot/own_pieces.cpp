#include "libddp/snapshot/own_pieces.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// A tensor of less is one rank's, the ranks in turns.
constexpr std::int64_t kSplitBytes = 64 << 10;
/// Parts of more begin on a boundary of so many elements.
constexpr std::int64_t kBoundary = 1024;

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

Range part_of(std::int64_t count, int index, int num_parts) {
  const std::int64_t each = (count / num_parts + kBoundary) / kBoundary * kBoundary;
  return {std::min(count, index * each), std::min(count, (index + 1) * each)};
}

}  // namespace

OwnPieces::OwnPieces(const std::vector<SnapshotTensor>& tensors, const JobRanks& ranks) {
  // Ranks may list the same tensors in different orders: an optimizer's state as it was loaded, and
  // as it was made.
  std::vector<std::reference_wrapper<const SnapshotTensor>> by_key(tensors.begin(), tensors.end());
  std::stable_sort(by_key.begin(), by_key.end(), [](const auto& left, const auto& right) {
    return left.get().key < right.get().key;
  });
  const auto twice = std::adjacent_find(
      by_key.begin(), by_key.end(),
      [](const auto& left, const auto& right) { return left.get().key == right.get().key; });
  if (twice != by_key.end()) {
    throw ArgumentError(
        fmt::format("libddp snapshot: key '{}' is given twice. Hint: a rank gives each key once; a "
                    "tensor that has two names goes under one of them.",
                    twice->get().key));
  }
  int next_small = 0;
  for (const SnapshotTensor& each : by_key) {
    each.check();
    const std::int64_t count = each.end - each.begin;
    const auto bytes = count * static_cast<std::int64_t>(each.tensor.element_size());
    switch (each.stored_by) {
      case StoredBy::EachRank:
        add(each, 0, count);
        break;
      case StoredBy::FirstOfHost:
        if (ranks.local_rank() == 0) add(each, 0, count);
        break;
      case StoredBy::HostTogether:
        if (bytes < kSplitBytes) {
          if (next_small++ % ranks.local_size() == ranks.local_rank()) add(each, 0, count);
        } else {
          const Range part = part_of(count, ranks.local_rank(), ranks.local_size());
          if (part.begin < part.end) add(each, part.begin, part.end);
        }
    }
  }
}

void OwnPieces::add(const SnapshotTensor& tensor, std::int64_t begin, std::int64_t end) {
  pieces_.push_back({.key = tensor.key,
                     .dtype = std::string(stored_dtype(tensor.tensor.scalar_type())),
                     .shape = tensor.shape,
                     .begin = tensor.begin + begin,
                     .end = tensor.begin + end});
  const bool is_all = end - begin == tensor.tensor.numel();
  tensors_.push_back(is_all ? tensor.tensor : tensor.tensor.reshape({-1}).slice(0, begin, end));
}

std::vector<at::Tensor> OwnPieces::in_order_of(const PieceLayout& layout) const {
  std::unordered_map<std::string_view, std::size_t> by_key;
  for (std::size_t i = 0; i < pieces_.size(); ++i) by_key.emplace(pieces_[i].key, i);
  std::vector<at::Tensor> ordered;
  ordered.reserve(pieces_.size());
  for (const Piece& piece : layout.pieces()) ordered.push_back(tensors_[by_key.at(piece.key)]);
  return ordered;
}

}  // namespace libddp
