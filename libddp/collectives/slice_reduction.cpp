#include "libddp/collectives/slice_reduction.h"

#include <algorithm>
#include <utility>

#include "libddp/base/cache_line.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_kernels.h"

namespace libddp {
namespace {

/// Whole cache lines, so that pieces hold whole elements.
/// Without barriers between them, pieces need only be long enough for the kernels.
constexpr std::uint64_t kMappedPieceBytes = 512u << 10;

}  // namespace

SliceReduction::SliceReduction(ShmCore& core, const Reduction& reduction, std::byte* data,
                               std::vector<std::uint64_t> edges, std::vector<std::uint64_t> starts)
    : core_(core),
      reduction_(reduction),
      data_(data),
      edges_(std::move(edges)),
      starts_(std::move(starts)) {}

bool SliceReduction::step() {
  if (!has_begun_) begin();
  if (next_piece_ == num_pieces_) return false;
  is_mapped_ ? reduce_mapped() : reduce_staged();
  ++next_piece_;
  ready_ = std::min<std::size_t>(size_of(core_.rank()), next_piece_ * piece_bytes_);
  return next_piece_ < num_pieces_;
}

// As all ranks' memory is in the arena or not, so all ranks choose the same way.
void SliceReduction::begin() {
  has_begun_ = true;
  std::uint64_t longest = 0;
  for (int rank = 0; rank < core_.world_size(); ++rank) longest = std::max(longest, size_of(rank));
  const auto cut = [&](std::uint64_t piece_bytes) {
    piece_bytes_ = piece_bytes;
    num_pieces_ = (longest + piece_bytes - 1) / piece_bytes;
  };
  cut(core_.policy().chunk_bytes / static_cast<std::uint64_t>(core_.world_size()) /
      kCacheLineBytes * kCacheLineBytes);
  const std::uint64_t offset = core_.peers().offset_of(data_, edges_.back());
  const bool in_arena = offset != Slot::kStaged;
  if (!in_arena) copy_in(0);
  core_.barrier(offset);
  is_mapped_ = core_.all_in_arena();
  if (is_mapped_) return cut(kMappedPieceBytes);
  if (core_.none_in_arena()) return;
  if (in_arena) copy_in(0);
  core_.barrier();
}

// The others read this rank's memory in their slices only, and nobody writes there before the ranks
// share what has come from the network, which they begin with a barrier.
void SliceReduction::reduce_mapped() {
  const int own = core_.rank();
  const std::uint64_t begin = edges_[static_cast<std::size_t>(own)];
  for_runs(own, next_piece_, [&](std::uint64_t at, std::uint64_t, std::uint64_t bytes) {
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) {
      sources[r] = core_.reach(r, core_.place(r), edges_.back()) + begin + at;
    }
    reduce_run(sources, at, bytes);
  });
}

// The piece has been copied in; the next one is, beside its reduction.
void SliceReduction::reduce_staged() {
  const int own = core_.rank();
  const std::uint64_t chunk = first_chunk_ + next_piece_;
  if (next_piece_ > 0) core_.barrier();
  for_runs(own, next_piece_, [&](std::uint64_t at, std::uint64_t in_piece, std::uint64_t bytes) {
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) sources[r] = staging(r, chunk, own) + in_piece;
    sources[own] = slice(own) + at;
    reduce_run(sources, at, bytes);
  });
  if (next_piece_ + 1 < num_pieces_) copy_in(next_piece_ + 1);
}

void SliceReduction::copy_in(std::uint64_t piece) {
  const std::uint64_t chunk = core_.next_chunk();
  if (piece == 0) first_chunk_ = chunk;
  for (int r = 0; r < core_.world_size(); ++r) {
    if (r == core_.rank()) continue;
    std::byte* to = staging(core_.rank(), chunk, r);
    for_runs(r, piece, [&](std::uint64_t at, std::uint64_t in_piece, std::uint64_t bytes) {
      copy_bytes(to + in_piece, slice(r) + at, bytes);
    });
  }
}

void SliceReduction::reduce_run(const std::byte* const* sources, std::uint64_t at,
                                std::uint64_t bytes) {
  std::byte* to = slice(core_.rank()) + at;
  reduce({.dtype = reduction_.dtype,
          .op = reduction_.op,
          .count = bytes / element_bytes(reduction_.dtype),
          .sources = sources,
          .num_sources = core_.world_size(),
          .destinations = &to,
          .num_destinations = 1,
          .scale = reduction_.scale});
}

/// A piece may go over the end of its slice and on at the beginning: function(place in the slice,
/// place in the piece, bytes).
template <class Function>
void SliceReduction::for_runs(int rank, std::uint64_t piece, Function function) const {
  const std::uint64_t size = size_of(rank);
  std::uint64_t from = piece * piece_bytes_;
  const std::uint64_t end = std::min(size, from + piece_bytes_);
  const std::uint64_t start = starts_[static_cast<std::size_t>(rank)];
  for (std::uint64_t done = 0; from < end;) {
    const std::uint64_t at = (start + from) % size;
    const std::uint64_t bytes = std::min(end - from, size - at);
    function(at, done, bytes);
    from += bytes;
    done += bytes;
  }
}

}  // namespace libddp
