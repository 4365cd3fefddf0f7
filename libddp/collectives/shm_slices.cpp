// The last stage of a collective over several hosts: some ranks of this host each bring a slice of
// a buffer, and all get all of it.
//
// Where the buffer is in the arena of all ranks, each pulls the slices out of their owners' memory;
// else they go through staging, a piece of every slice per barrier.

#include <algorithm>

#include "libddp/collectives/shm_collectives.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {
namespace {

class ShareSlices {
 public:
  ShareSlices(ShmCore& core, std::byte* data, const std::vector<std::uint64_t>& edges)
      : core_(core), data_(data), edges_(edges), num_slices_(static_cast<int>(edges.size()) - 1) {}

  void run() {
    const std::uint64_t bytes = edges_.back();
    if (bytes == 0) return;
    const std::uint64_t offset = core_.peers().offset_of(data_, bytes);
    core_.barrier(offset);
    if (!core_.all_in_arena()) return share_staged();
    for (int step = 1; step < core_.world_size(); ++step) {
      const int owner = (core_.rank() + step) % core_.world_size();
      if (owner >= num_slices_) continue;
      const std::byte* from = core_.reach(owner, core_.place(owner), bytes);
      copy_bytes(data_ + begin(owner), from + begin(owner), size(owner));
    }
    core_.barrier();  // nobody reads this rank's memory any more
  }

 private:
  void share_staged() {
    std::uint64_t longest = 0;
    for (int owner = 0; owner < num_slices_; ++owner) longest = std::max(longest, size(owner));
    const std::uint64_t piece = core_.policy().chunk_bytes;
    for (std::uint64_t at = 0; at < longest; at += piece) {
      const std::uint64_t chunk = core_.next_chunk();
      if (core_.rank() < num_slices_) {
        copy_bytes(core_.staging_in(core_.rank(), chunk), data_ + begin(core_.rank()) + at,
                   part_of(core_.rank(), at, piece));
      }
      core_.barrier();
      for (int owner = 0; owner < num_slices_; ++owner) {
        if (owner == core_.rank()) continue;
        copy_bytes(data_ + begin(owner) + at, core_.staging_in(owner, chunk),
                   part_of(owner, at, piece));
      }
    }
  }

  std::uint64_t begin(int owner) const { return edges_[static_cast<std::size_t>(owner)]; }
  std::uint64_t size(int owner) const {
    return edges_[static_cast<std::size_t>(owner) + 1] - begin(owner);
  }
  std::uint64_t part_of(int owner, std::uint64_t at, std::uint64_t piece) const {
    return size(owner) > at ? std::min(piece, size(owner) - at) : 0;
  }

  ShmCore& core_;
  std::byte* data_;
  const std::vector<std::uint64_t>& edges_;
  const int num_slices_;
};

}  // namespace

void share_slices(ShmCore& core, std::byte* data, const std::vector<std::uint64_t>& edges) {
  ShareSlices(core, data, edges).run();
}

}  // namespace libddp
