#pragma once

// The first stage of a large reduction over several hosts, in pieces: each rank of this host owns a
// slice of the buffer and gets the sum (or other op) of the host's ranks there, in its own memory
// only. What is ready can leave for other hosts while the next piece is reduced.
//
// The pieces of slice i begin at `starts[i]`, go on to the slice's end and then from its beginning:
// what other hosts need comes first. In the arena a rank reads the others' memory; elsewhere a
// piece of each slice goes through staging per barrier. Every rank makes as many steps.
// Thread rule: as the core.
//
//   SliceReduction reduction(core, {Dtype::Float32, ReduceOp::Sum}, data, edges, starts);
//   while (reduction.step()) send(reduction.ready());

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libddp/collectives/inter_stage.h"
#include "libddp/collectives/shm_collectives.h"

namespace libddp {

class SliceReduction final : public Preparation {
 public:
  /// `edges`: rank i owns the bytes [edges[i], edges[i + 1]) of `data`; `starts` count from there.
  SliceReduction(ShmCore& core, const Reduction& reduction, std::byte* data,
                 std::vector<std::uint64_t> edges, std::vector<std::uint64_t> starts);

  bool step() override;
  std::size_t ready() const override { return ready_; }

 private:
  void begin();
  void reduce_mapped();
  void reduce_staged();
  void copy_in(std::uint64_t piece);
  void reduce_run(const std::byte* const* sources, std::uint64_t at, std::uint64_t bytes);
  template <class Function>
  void for_runs(int rank, std::uint64_t piece, Function function) const;
  std::uint64_t size_of(int rank) const {
    return edges_[static_cast<std::size_t>(rank) + 1] - edges_[static_cast<std::size_t>(rank)];
  }
  std::byte* slice(int rank) const { return data_ + edges_[static_cast<std::size_t>(rank)]; }
  std::byte* staging(int from, std::uint64_t chunk, int to) const {
    return core_.staging_in(from, chunk) + static_cast<std::uint64_t>(to) * piece_bytes_;
  }

  ShmCore& core_;
  const Reduction reduction_;
  std::byte* const data_;
  const std::vector<std::uint64_t> edges_;
  const std::vector<std::uint64_t> starts_;
  std::uint64_t piece_bytes_ = 0;
  std::uint64_t num_pieces_ = 0;
  std::uint64_t next_piece_ = 0;
  std::uint64_t first_chunk_ = 0;
  std::size_t ready_ = 0;
  bool has_begun_ = false;
  bool is_mapped_ = false;
};

}  // namespace libddp
