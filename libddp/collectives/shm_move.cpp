#include "libddp/collectives/shm_move.h"

namespace libddp {

bool ShmMove::move(const std::byte* input, std::size_t input_bytes, const std::byte* output,
                   std::size_t output_bytes, std::size_t num_pieces) {
  const std::uint64_t from = core_.peers().offset_of(input, input_bytes);
  const std::uint64_t to = core_.peers().offset_of(output, output_bytes);
  // A rank with nothing in the arena knows already that the bytes must be staged.
  const bool is_staged = from == Slot::kStaged && to == Slot::kStaged;
  if (is_staged) stage(0);
  core_.barrier(from, to);
  if (core_.all_in_arena(0) || core_.all_in_arena(1)) {
    core_.all_in_arena(0) ? pull() : push();
    // Nobody reads this rank's input any more, and every block of its output has come.
    core_.barrier();
    return false;
  }
  if (!core_.none_in_arena(0) || !core_.none_in_arena(1)) {
    if (!is_staged) stage(0);
    core_.barrier();
  }
  for (std::size_t k = 0; k < num_pieces; ++k) {
    if (k > 0) core_.barrier();
    const std::uint64_t chunk = chunk_;
    if (k + 1 < num_pieces) stage(k + 1);
    copy_out(k, chunk);
  }
  return true;
}

void ShmMove::stage(std::size_t k) {
  chunk_ = core_.next_chunk();
  copy_in(k, chunk_);
}

}  // namespace libddp
