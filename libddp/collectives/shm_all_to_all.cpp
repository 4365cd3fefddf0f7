// All-to-all of equal blocks between the ranks of a host: block r of a rank's input goes to rank r.
// The own block is the caller's to copy.
//
// Small: the whole input lies in the slot. Larger ones: see ShmMove.

#include <algorithm>

#include "libddp/collectives/shm_collectives.h"
#include "libddp/collectives/shm_move.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {
namespace {

class AllToAll : ShmMove {
 public:
  AllToAll(ShmCore& core, const std::byte* input, std::byte* output, std::size_t block_bytes)
      : ShmMove(core),
        input_(input),
        output_(output),
        block_bytes_(block_bytes),
        total_bytes_(block_bytes * core.world_size()) {}

  void run() {
    if (total_bytes_ <= core_.policy().inline_bytes) return exchange_payloads();
    const std::size_t num_pieces = (block_bytes_ + piece_bytes() - 1) / piece_bytes();
    move(input_, total_bytes_, output_, total_bytes_, num_pieces);
  }

 private:
  void exchange_payloads() {
    copy_bytes(core_.own_payload(total_bytes_), input_, total_bytes_);
    core_.barrier_with_payload(total_bytes_);
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      copy_bytes(output_ + r * block_bytes_, core_.payload(r, total_bytes_) + own(block_bytes_),
                 block_bytes_);
    }
  }

  // Each rank starts at its right neighbour, so that not all read the same memory.
  void pull() override {
    for (int step = 1; step < core_.world_size(); ++step) {
      const int r = (core_.rank() + step) % core_.world_size();
      const std::byte* from = core_.reach(r, core_.place(r), total_bytes_);
      copy_part(output_ + r * block_bytes_, from + own(block_bytes_), block_bytes_, total_bytes_);
    }
  }

  void push() override {
    for (int step = 1; step < core_.world_size(); ++step) {
      const int r = (core_.rank() + step) % core_.world_size();
      std::byte* to = core_.reach(r, core_.place(r, 1), total_bytes_);
      const std::byte* from = input_ + r * block_bytes_;
      core_.write_in_pieces(block_bytes_, [&](std::size_t at, std::size_t bytes) {
        copy_part(to + own(block_bytes_) + at, from + at, bytes, total_bytes_);
      });
    }
  }

  // Piece k of every block but the own one.
  void copy_in(std::size_t k, std::uint64_t chunk) override {
    std::byte* to = core_.staging_in(core_.rank(), chunk);
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      copy_bytes(to + r * piece_bytes(), input_ + r * block_bytes_ + k * piece_bytes(),
                 bytes_of(k));
    }
  }

  void copy_out(std::size_t k, std::uint64_t chunk) override {
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      copy_part(output_ + r * block_bytes_ + k * piece_bytes(),
                core_.staging_in(r, chunk) + own(piece_bytes()), bytes_of(k), total_bytes_);
    }
  }

  /// Where the block of this rank begins among blocks of so many bytes.
  std::size_t own(std::size_t bytes) const { return core_.rank() * bytes; }
  // Of each block per chunk; a multiple of a cache line.
  std::size_t piece_bytes() const {
    return core_.policy().chunk_bytes / core_.world_size() / 64 * 64;
  }
  std::size_t bytes_of(std::size_t k) const {
    return std::min(piece_bytes(), block_bytes_ - k * piece_bytes());
  }

  const std::byte* input_;
  std::byte* output_;
  const std::size_t block_bytes_;
  const std::size_t total_bytes_;
};

}  // namespace

void all_to_all(ShmCore& core, const std::byte* input, std::byte* output, std::size_t block_bytes) {
  AllToAll(core, input, output, block_bytes).run();
}

}  // namespace libddp
