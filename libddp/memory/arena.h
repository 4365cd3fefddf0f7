#pragma once

// Memory of one rank in one group that the other local ranks map: buckets, and tensors that users
// allocate in it. Peers find bytes by offset, so "rank 3, offset 4096" means the same everywhere.
//
// The segment is reserved once, sparse, as large as the host's memory: growing needs no new
// descriptor and no exchange. Freed blocks are kept for reuse up to a limit, then given back to the
// kernel page by page (hole punching). Two things are kept from both: a block that is left to the
// peers, and all that is freed once the group has failed, because a rank that was frozen in a
// collective goes on writing when it wakes.
// Thread rule: all members may be called from any thread. Blocks outlive the Arena object: the
// shared_ptr of a block keeps the mapping.
//
//   std::shared_ptr<Arena> arena = Arena::create("world", reserve_bytes);
//   std::shared_ptr<std::byte> block = arena->allocate(1 << 20);
//   std::optional<std::uint64_t> offset = arena->offset_of(block.get(), 1 << 20);

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "libddp/memory/shared_segment.h"

namespace libddp {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Alignment of every block: a cache line pair; blocks of 2 MiB and more stand on huge pages.
  static constexpr std::size_t kAlignment = 128;

  /// Bytes worth reserving for one of `world_size` local ranks on this host (sparse).
  static std::size_t default_reserve_bytes(int world_size);

  static std::shared_ptr<Arena> create(const std::string& group_name, std::size_t reserve_bytes);
  ~Arena();

  /// A block of at least `size_bytes` (0 gives a valid unique pointer). Contents are undefined.
  /// Throws Error naming the sizes when the reservation is used up, StateError in a child of
  /// fork(): the memory is the parent's. Freeing a block there does nothing to the memory.
  /// Pages of large blocks are faulted in by a background thread.
  std::shared_ptr<std::byte> allocate(std::size_t size_bytes);

  /// Instead of freeing `block` (of this arena, the last reference): its bytes stay for the peers
  /// that read and write them. The kernel frees the pages with the last mapping of the segment.
  static void leave_to_peers(std::shared_ptr<std::byte> block) noexcept;

  /// What is freed from now on is neither handed out again nor given back to the kernel: peers may
  /// still write there.
  void keep_freed() noexcept;

  /// Offset in the segment if all of [pointer, pointer + size_bytes) lies in it. No lock.
  std::optional<std::uint64_t> offset_of(const void* pointer,
                                         std::size_t size_bytes) const noexcept;

  /// Bytes handed out and not yet freed. StateError in a child of fork().
  std::size_t used_bytes() const;

  const SharedSegment& segment() const;

 private:
  struct State;
  struct Freeing;
  explicit Arena(std::shared_ptr<State> state);

  std::shared_ptr<State> state_;  // also held by every block
};

}  // namespace libddp
