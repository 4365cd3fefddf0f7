// All-gather and broadcast between the ranks of a host: bytes that only move.
//
// Where all inputs are in the arena the readers pull; where all outputs are, the owners push; else
// the bytes go through staging, one meeting per chunk: the copy-in of a chunk overlaps the copy-out
// of the one before.

#include <algorithm>

#include "libddp/collectives/copy_bytes.h"
#include "libddp/collectives/host_collectives.h"

namespace libddp {
namespace {

class AllGather {
 public:
  AllGather(MeshCore& core, const std::byte* input, std::byte* output, std::size_t bytes)
      : core_(core), input_(input), output_(output), bytes_(bytes) {}

  void run() {
    if (bytes_ <= core_.policy().inline_bytes) return gather_payloads();
    const std::uint64_t from = core_.offset_of(input_, bytes_);
    const std::uint64_t to = core_.offset_of(output_, bytes_ * core_.world_size());
    // A rank with nothing in the arena knows already that the bytes must be staged.
    const bool is_staged = from == Slot::kStaged && to == Slot::kStaged;
    if (is_staged) copy_in(0);
    core_.meet(from, to);
    if (core_.all_in_arena(0)) return pull();
    if (core_.all_in_arena(1)) return push();
    if (!core_.none_in_arena(0) || !core_.none_in_arena(1)) {
      if (!is_staged) copy_in(0);
      core_.meet();
    }
    gather_staged();
  }

 private:
  void gather_payloads() {
    copy_bytes(core_.own_payload(bytes_), input_, bytes_);
    core_.meet_with_payload(bytes_);
    for (int r = 0; r < core_.world_size(); ++r)
      copy_bytes(block(r), core_.payload(r, bytes_), bytes_);
  }

  // Each rank starts at its right neighbour, so that not all read the same memory.
  void pull() {
    for (int step = 0; step < core_.world_size(); ++step) {
      const int r = (core_.rank() + step) % core_.world_size();
      const std::byte* from = r == core_.rank() ? input_ : core_.reach(r, core_.place(r), bytes_);
      copy_part(block(r), from, bytes_, bytes_ * core_.world_size());
    }
    core_.meet();  // nobody reads this rank's input any more
  }

  void push() {
    const std::size_t output_bytes = bytes_ * core_.world_size();
    for (int step = 0; step < core_.world_size(); ++step) {
      const int r = (core_.rank() + step) % core_.world_size();
      std::byte* to = r == core_.rank() ? output_ : core_.reach(r, core_.place(r, 1), output_bytes);
      copy_part(to + core_.rank() * bytes_, input_, bytes_, output_bytes);
    }
    core_.meet();  // every block of this rank's output has come
  }

  // Own block last: the copy onto itself or within this rank's memory keeps nobody waiting.
  void gather_staged() {
    const std::size_t num_chunks = (bytes_ + chunk_bytes() - 1) / chunk_bytes();
    for (std::size_t k = 0; k < num_chunks; ++k) {
      if (k > 0) core_.meet();
      const std::uint64_t chunk = chunk_;
      if (k + 1 < num_chunks) copy_in(k + 1);
      copy_out(k, chunk);
    }
    copy_part(block(core_.rank()), input_, bytes_, bytes_ * core_.world_size());
  }

  void copy_in(std::size_t k) {
    chunk_ = core_.next_chunk();
    copy_bytes(core_.staging_in(core_.rank(), chunk_), input_ + k * chunk_bytes(), part_bytes(k));
  }

  void copy_out(std::size_t k, std::uint64_t chunk) {
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      copy_part(block(r) + k * chunk_bytes(), core_.staging_in(r, chunk), part_bytes(k),
                bytes_ * core_.world_size());
    }
  }

  std::size_t chunk_bytes() const { return core_.policy().chunk_bytes; }
  std::size_t part_bytes(std::size_t k) const {
    return std::min(chunk_bytes(), bytes_ - k * chunk_bytes());
  }
  std::byte* block(int rank) const { return output_ + rank * bytes_; }

  MeshCore& core_;
  const std::byte* input_;
  std::byte* output_;
  const std::size_t bytes_;
  std::uint64_t chunk_ = 0;
};

}  // namespace

void all_gather(MeshCore& core, const std::byte* input, std::byte* output,
                std::size_t input_bytes) {
  AllGather(core, input, output, input_bytes).run();
}

void broadcast(MeshCore& core, std::byte* data, std::size_t bytes, int root) {
  const bool is_root = core.rank() == root;
  if (bytes <= core.policy().inline_bytes) {
    if (is_root) copy_bytes(core.own_payload(bytes), data, bytes);
    core.meet_with_payload(bytes);
    if (!is_root) copy_bytes(data, core.payload(root, bytes), bytes);
    return;
  }
  const std::uint64_t offset = is_root ? core.offset_of(data, bytes) : Slot::kStaged;
  const std::size_t chunk_bytes = core.policy().chunk_bytes;
  for (std::size_t at = 0; at < bytes; at += chunk_bytes) {
    const std::size_t part = std::min(chunk_bytes, bytes - at);
    const bool is_staged = is_root && offset == Slot::kStaged;
    if (is_staged) copy_bytes(core.staging_in(root, core.next_chunk()), data + at, part);
    core.meet(offset);
    if (core.place(root) != Slot::kStaged) {
      if (!is_root) copy_bytes(data, core.reach(root, core.place(root), bytes), bytes);
      return core.meet();  // nobody reads the root's memory any more
    }
    if (!is_root) copy_part(data + at, core.staging_in(root, core.next_chunk()), part, bytes);
  }
}

}  // namespace libddp
