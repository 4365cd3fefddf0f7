// Reduce-scatter between the ranks of a host: every rank reduces its own block.
//
// Small: the whole input lies in the slot. In the arena: the owner reads its block out of all
// ranks' inputs and writes its output, wherever that is. Elsewhere: pieces of all blocks go through
// staging; the own block never leaves its memory.

#include <algorithm>

#include "libddp/collectives/shm_collectives.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_kernels.h"

namespace libddp {
namespace {

class ReduceScatter {
 public:
  ReduceScatter(ShmCore& core, const Reduction& reduction, const std::byte* input,
                std::byte* output, std::size_t count)
      : core_(core),
        reduction_(reduction),
        input_(input),
        output_(output),
        count_(count),
        element_(element_bytes(reduction.dtype)),
        block_bytes_(count * element_),
        input_bytes_(block_bytes_ * core.world_size()) {}

  void run() {
    if (input_bytes_ <= core_.policy().inline_bytes) return reduce_payloads();
    const std::uint64_t offset = core_.peers().offset_of(input_, input_bytes_);
    const bool in_arena = offset != Slot::kStaged;
    if (!in_arena) copy_in(0);
    core_.barrier(offset);
    if (core_.all_in_arena()) return reduce_in_place();
    if (!core_.none_in_arena()) {
      if (in_arena) copy_in(0);
      core_.barrier();
    }
    reduce_staged();
  }

 private:
  void reduce_payloads() {
    copy_bytes(core_.own_payload(input_bytes_), input_, input_bytes_);
    core_.barrier_with_payload(input_bytes_);
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) {
      sources[r] = core_.payload(r, input_bytes_) + core_.rank() * block_bytes_;
    }
    run_kernel(sources, output_, count_);
  }

  void reduce_in_place() {
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) {
      sources[r] = core_.reach(r, core_.place(r), input_bytes_) + core_.rank() * block_bytes_;
    }
    run_kernel(sources, output_, count_);
    core_.barrier();  // nobody reads this rank's input any more
  }

  void reduce_staged() {
    const std::size_t num_pieces = (count_ + piece_count() - 1) / piece_count();
    for (std::size_t k = 0; k < num_pieces; ++k) {
      reduce_piece(k);
      if (k + 1 == num_pieces) break;
      copy_in(k + 1);
      core_.barrier();
    }
  }

  void reduce_piece(std::size_t k) {
    const std::size_t at = k * piece_count() * element_;
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) {
      sources[r] = core_.staging_in(r, first_chunk_ + k) + core_.rank() * piece_count() * element_;
    }
    sources[core_.rank()] = input_ + core_.rank() * block_bytes_ + at;
    run_kernel(sources, output_ + at, count_of(k));
  }

  // Piece k of every block but the own one.
  void copy_in(std::size_t k) {
    const std::uint64_t chunk = core_.next_chunk();
    if (k == 0) first_chunk_ = chunk;
    std::byte* to = core_.staging_in(core_.rank(), chunk);
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      const std::byte* from = input_ + r * block_bytes_ + k * piece_count() * element_;
      copy_bytes(to + r * piece_count() * element_, from, count_of(k) * element_);
    }
  }

  void run_kernel(const std::byte* const* sources, std::byte* destination, std::size_t count) {
    reduce({.dtype = reduction_.dtype,
            .op = reduction_.op,
            .count = count,
            .sources = sources,
            .num_sources = core_.world_size(),
            .destinations = &destination,
            .num_destinations = 1,
            .scale = reduction_.scale,
            .whole_count = count_});
  }

  // Elements of each block per chunk; a multiple of a cache line.
  std::size_t piece_count() const {
    return core_.policy().chunk_bytes / core_.world_size() / 64 * 64 / element_;
  }
  std::size_t count_of(std::size_t k) const {
    return std::min(piece_count(), count_ - k * piece_count());
  }

  ShmCore& core_;
  const Reduction& reduction_;
  const std::byte* input_;
  std::byte* output_;
  const std::size_t count_;
  const std::size_t element_;
  const std::size_t block_bytes_;
  const std::size_t input_bytes_;
  std::uint64_t first_chunk_ = 0;
};

}  // namespace

void reduce_scatter(ShmCore& core, const Reduction& reduction, const std::byte* input,
                    std::byte* output, std::size_t output_count) {
  ReduceScatter(core, reduction, input, output, output_count).run();
}

}  // namespace libddp
