// All-gather and broadcast between the ranks of a host: bytes that only move.

#include <algorithm>

#include "libddp/collectives/shm_collectives.h"
#include "libddp/collectives/shm_move.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {
namespace {

class AllGather : ShmMove {
 public:
  AllGather(ShmCore& core, const std::byte* input, std::byte* output, std::size_t bytes)
      : ShmMove(core),
        input_(input),
        output_(output),
        bytes_(bytes),
        output_bytes_(bytes * core.world_size()) {}

  void run() {
    if (bytes_ <= core_.policy().inline_bytes) return gather_payloads();
    const std::size_t num_pieces = (bytes_ + chunk_bytes() - 1) / chunk_bytes();
    const bool is_staged = move(input_, bytes_, output_, output_bytes_, num_pieces);
    // Last: the copy onto itself or within this rank's memory keeps nobody waiting.
    if (is_staged) copy_part(block(core_.rank()), input_, bytes_, output_bytes_);
  }

 private:
  void gather_payloads() {
    copy_bytes(core_.own_payload(bytes_), input_, bytes_);
    core_.barrier_with_payload(bytes_);
    for (int r = 0; r < core_.world_size(); ++r)
      copy_bytes(block(r), core_.payload(r, bytes_), bytes_);
  }

  // Each rank starts at itself, so that not all read the same memory.
  void pull() override {
    for (int step = 0; step < core_.world_size(); ++step) {
      const int r = (core_.rank() + step) % core_.world_size();
      const std::byte* from = r == core_.rank() ? input_ : core_.reach(r, core_.place(r), bytes_);
      copy_part(block(r), from, bytes_, output_bytes_);
    }
  }

  void push() override {
    for (int step = 0; step < core_.world_size(); ++step) {
      const int r = (core_.rank() + step) % core_.world_size();
      std::byte* to =
          r == core_.rank() ? output_ : core_.reach(r, core_.place(r, 1), output_bytes_);
      core_.write_in_pieces(bytes_, [&](std::size_t at, std::size_t bytes) {
        copy_part(to + core_.rank() * bytes_ + at, input_ + at, bytes, output_bytes_);
      });
    }
  }

  void copy_in(std::size_t k, std::uint64_t chunk) override {
    copy_bytes(core_.staging_in(core_.rank(), chunk), input_ + k * chunk_bytes(), bytes_of(k));
  }

  void copy_out(std::size_t k, std::uint64_t chunk) override {
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      copy_part(block(r) + k * chunk_bytes(), core_.staging_in(r, chunk), bytes_of(k),
                output_bytes_);
    }
  }

  std::size_t chunk_bytes() const { return core_.policy().chunk_bytes; }
  std::size_t bytes_of(std::size_t k) const {
    return std::min(chunk_bytes(), bytes_ - k * chunk_bytes());
  }
  std::byte* block(int rank) const { return output_ + rank * bytes_; }

  const std::byte* input_;
  std::byte* output_;
  const std::size_t bytes_;
  const std::size_t output_bytes_;
};

}  // namespace

void all_gather(ShmCore& core, const std::byte* input, std::byte* output, std::size_t input_bytes) {
  AllGather(core, input, output, input_bytes).run();
}

void broadcast(ShmCore& core, std::byte* data, std::size_t bytes, int root) {
  const bool is_root = core.rank() == root;
  if (bytes <= core.policy().inline_bytes) {
    if (is_root) copy_bytes(core.own_payload(bytes), data, bytes);
    core.barrier_with_payload(bytes);
    if (!is_root) copy_bytes(data, core.payload(root, bytes), bytes);
    return;
  }
  const std::uint64_t offset = is_root ? core.peers().offset_of(data, bytes) : Slot::kStaged;
  const std::size_t chunk_bytes = core.policy().chunk_bytes;
  for (std::size_t at = 0; at < bytes; at += chunk_bytes) {
    const std::size_t part = std::min(chunk_bytes, bytes - at);
    const bool is_staged = is_root && offset == Slot::kStaged;
    if (is_staged) copy_bytes(core.staging_in(root, core.next_chunk()), data + at, part);
    core.barrier(offset);
    if (core.place(root) != Slot::kStaged) {
      if (!is_root) copy_bytes(data, core.reach(root, core.place(root), bytes), bytes);
      return core.barrier();  // nobody reads the root's memory any more
    }
    if (!is_root) copy_part(data + at, core.staging_in(root, core.next_chunk()), part, bytes);
  }
}

}  // namespace libddp
