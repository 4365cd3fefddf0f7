// All-reduce between the ranks of a host.
//
// Small: everyone's payload lies in the slots, and every rank reduces all of it (one barrier).
// In the arena: each rank reduces its slice out of all ranks' memory and stores the result into all
// ranks' memory (two barriers, no copies).
// Elsewhere: chunk by chunk through staging. A rank's own slice never leaves its memory: it copies
// in only what others reduce, and copies out only what others have reduced.

#include <algorithm>

#include "libddp/base/cache_line.h"
#include "libddp/collectives/shm_collectives.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_kernels.h"

namespace libddp {
namespace {

class AllReduce {
 public:
  AllReduce(ShmCore& core, const Reduction& reduction, std::byte* data, std::size_t count)
      : core_(core),
        reduction_(reduction),
        data_(data),
        count_(count),
        element_(element_bytes(reduction.dtype)),
        bytes_(count * element_) {}

  void run() {
    const WaitPolicy& policy = core_.policy();
    if (bytes_ <= policy.inline_bytes) return reduce_inline();
    const std::uint64_t offset = core_.peers().offset_of(data_, bytes_);
    const bool in_arena = offset != Slot::kStaged;
    const bool fits_inline = bytes_ <= policy.ordinary_inline_bytes;
    if (in_arena) {
      core_.barrier(offset);
    } else if (fits_inline) {
      copy_bytes(core_.own_payload(bytes_), data_, bytes_);
      core_.barrier(Slot::kInline);
    } else {
      copy_in(0);
      core_.barrier();
    }
    if (core_.all_in_arena()) return reduce_in_place();
    // Some ranks are in the arena and some are not: those in it join the others' way.
    const bool is_mixed = !core_.none_in_arena();
    if (fits_inline) return is_mixed ? reduce_inline() : reduce_payloads();
    if (is_mixed) {
      if (in_arena) copy_in(0);
      core_.barrier();
    }
    reduce_staged();
  }

 private:
  void reduce_inline() {
    copy_bytes(core_.own_payload(bytes_), data_, bytes_);
    core_.barrier_with_payload(bytes_);
    reduce_payloads();
  }

  void reduce_payloads() {
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) sources[r] = core_.payload(r, bytes_);
    run_kernel(sources, &data_, 1, count_);
  }

  void reduce_in_place() {
    const Slice slice = slice_of(count_, element_, core_.rank(), core_.world_size());
    std::byte* parts[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) {
      std::byte* base = core_.reach(r, core_.place(r), bytes_);
      parts[r] = base + slice.begin * element_;
    }
    core_.write_in_pieces(slice.count() * element_, [&](std::size_t at, std::size_t bytes) {
      std::byte* pieces[kMaxRanks];
      for (int r = 0; r < core_.world_size(); ++r) pieces[r] = parts[r] + at;
      run_kernel(pieces, pieces, core_.world_size(), bytes / element_);
    });
    core_.barrier();
  }

  // After barrier k the ranks reduce chunk k; beside that, chunk k-1 is copied out and chunk k+1
  // copied in: one barrier per chunk. The reduction goes first, because others wait for it.
  void reduce_staged() {
    const std::size_t num_chunks = (count_ + chunk_count() - 1) / chunk_count();
    for (std::size_t k = 0; k <= num_chunks; ++k) {
      if (k < num_chunks) reduce_chunk(k);
      if (k + 1 < num_chunks) copy_in(k + 1);
      if (k > 0) copy_out(k - 1);
      if (k < num_chunks) core_.barrier();
    }
  }

  void reduce_chunk(std::size_t k) {
    const Slice slice = chunk_slice(k, core_.rank());
    if (slice.count() == 0) return;
    std::byte* own = chunk_data(k) + slice.begin * element_;
    const std::byte* sources[kMaxRanks];
    for (int r = 0; r < core_.world_size(); ++r) {
      sources[r] = core_.staging_in(r, buffer(k)) + slice.begin * element_;
    }
    sources[core_.rank()] = own;
    std::byte* destinations[] = {
        own, core_.staging_out(core_.rank(), buffer(k)) + slice.begin * element_};
    run_kernel(sources, destinations, 2, slice.count());
  }

  void copy_in(std::size_t k) {
    if (k == 0) first_chunk_ = core_.next_chunk();
    if (k > 0) core_.next_chunk();
    std::byte* to = core_.staging_in(core_.rank(), buffer(k));
    for_slices_of_others(k, [&](int, std::size_t at, std::size_t bytes) {
      copy_bytes(to + at, chunk_data(k) + at, bytes);
    });
  }

  void copy_out(std::size_t k) {
    for_slices_of_others(k, [&](int r, std::size_t at, std::size_t bytes) {
      copy_bytes(chunk_data(k) + at, core_.staging_out(r, buffer(k)) + at, bytes);
    });
  }

  template <class Function>
  void for_slices_of_others(std::size_t k, Function function) {
    for (int r = 0; r < core_.world_size(); ++r) {
      if (r == core_.rank()) continue;
      const Slice slice = chunk_slice(k, r);
      if (slice.count() > 0) function(r, slice.begin * element_, slice.count() * element_);
    }
  }

  template <class Sources>
  void run_kernel(Sources& sources, std::byte* const* destinations, int num_destinations,
                  std::size_t count) {
    reduce({.dtype = reduction_.dtype,
            .op = reduction_.op,
            .count = count,
            .sources = sources,
            .num_sources = core_.world_size(),
            .destinations = destinations,
            .num_destinations = num_destinations,
            .scale = reduction_.scale});
  }

  std::size_t chunk_count() const { return core_.policy().chunk_bytes / element_; }
  std::byte* chunk_data(std::size_t k) const { return data_ + k * chunk_count() * element_; }
  std::uint64_t buffer(std::size_t k) const { return first_chunk_ + k; }
  Slice chunk_slice(std::size_t k, int rank) const {
    const std::size_t count = std::min(chunk_count(), count_ - k * chunk_count());
    return slice_of(count, element_, rank, core_.world_size());
  }

  ShmCore& core_;
  const Reduction& reduction_;
  std::byte* data_;
  const std::size_t count_;
  const std::size_t element_;
  const std::size_t bytes_;
  std::uint64_t first_chunk_ = 0;
};

}  // namespace

Slice slice_of(std::size_t count, std::size_t element_bytes, int rank, int world_size) {
  const std::size_t per_line = kCacheLineBytes / element_bytes;
  const std::size_t lines = (count + per_line - 1) / per_line;
  const auto edge = [&](int r) {
    return std::min(count, lines * static_cast<std::size_t>(r) / world_size * per_line);
  };
  return {edge(rank), edge(rank + 1)};
}

void all_reduce(ShmCore& core, const Reduction& reduction, std::byte* data, std::size_t count) {
  AllReduce(core, reduction, data, count).run();
}

}  // namespace libddp
