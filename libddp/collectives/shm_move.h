#pragma once

// What an all-gather and an all-to-all of a host have in common: bytes that only move, out of every
// rank's input into every rank's output. Where all inputs are in the arena the readers pull; where
// all outputs are, the owners push; else the bytes go through staging piece by piece, one barrier
// for each: the copy-in of a piece overlaps the copy-out of the one before.
// Thread rule: one at a time per core.
//
//   class AllGather : ShmMove { ... };   // says what a piece is
//   const bool is_staged = move(input, input_bytes, output, output_bytes, num_pieces);

#include <cstddef>
#include <cstdint>

#include "libddp/collectives/shm_core.h"

namespace libddp {

class ShmMove {
 protected:
  explicit ShmMove(ShmCore& core) : core_(core) {}
  ~ShmMove() = default;
  ShmMove(const ShmMove&) = delete;
  ShmMove& operator=(const ShmMove&) = delete;

  /// Runs the whole move; true if it went through staging. The sizes are equal on all ranks.
  bool move(const std::byte* input, std::size_t input_bytes, const std::byte* output,
            std::size_t output_bytes, std::size_t num_pieces);

  /// Out of all ranks' inputs; the barrier after it is not its business.
  virtual void pull() = 0;
  /// Into all ranks' outputs; likewise.
  virtual void push() = 0;
  /// Piece k for the others, into the own staging buffer of `chunk`; and from the others'.
  virtual void copy_in(std::size_t k, std::uint64_t chunk) = 0;
  virtual void copy_out(std::size_t k, std::uint64_t chunk) = 0;

  ShmCore& core_;

 private:
  void stage(std::size_t k);

  std::uint64_t chunk_ = 0;
};

}  // namespace libddp
