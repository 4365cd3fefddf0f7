#include "libddp/snapshot/own_pieces.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <sstream>
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

/// The first line that one of two sorted lists has and the other lacks.
std::string difference_of(const std::string& first, const std::string& other) {
  std::istringstream left(first);
  std::istringstream right(other);
  std::string mine;
  std::string theirs;
  while (true) {
    const bool has_mine = static_cast<bool>(std::getline(left, mine));
    const bool has_theirs = static_cast<bool>(std::getline(right, theirs));
    if (!has_mine && !has_theirs) return "in their order";
    if (!has_theirs) return fmt::format("the latter has no {}", mine);
    if (!has_mine) return fmt::format("the former has no {}", theirs);
    if (mine != theirs) return fmt::format("{} and {}", mine, theirs);
  }
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
        together_.push_back(fmt::format("'{}' {} [{}]", each.key,
                                        c10::toString(each.tensor.scalar_type()),
                                        fmt::join(each.shape, ", ")));
        if (bytes < kSplitBytes) {
          if (next_small++ % ranks.local_size() == ranks.local_rank()) add(each, 0, count);
        } else {
          const Range part = part_of(count, ranks.local_rank(), ranks.local_size());
          if (part.begin < part.end) add(each, part.begin, part.end);
        }
    }
  }
}

void OwnPieces::check_alike(const JobRanks& ranks) const {
  const std::string lines = fmt::format("{}", fmt::join(together_, "\n"));
  const auto digest = static_cast<std::int64_t>(std::hash<std::string>{}(lines));
  const auto digests = ranks.gather_numbers({digest});
  const auto first_of_host = [&](int rank) {
    return ranks.hosts().ranks_of(ranks.hosts().host(rank)).front();
  };
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const int first = first_of_host(rank);
    if (digests[static_cast<std::size_t>(rank)] == digests[static_cast<std::size_t>(first)])
      continue;
    const std::vector<std::string> all = ranks.gather(lines);
    throw ArgumentError(fmt::format(
        "libddp snapshot: ranks {} and {} of one host store other tensors together: {}. Hint: what "
        "is StoredBy::HostTogether (replicated models and their optimizers) is the same on all "
        "ranks of a host.",
        first, rank,
        difference_of(all[static_cast<std::size_t>(first)], all[static_cast<std::size_t>(rank)])));
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
