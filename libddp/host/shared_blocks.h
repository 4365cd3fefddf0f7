#pragma once

// Blocks of an arena that all ranks of a host use as one: each lies in one rank's arena, and goes
// back to it when the last rank has let go.
//
// A head in front of the bytes counts the holders. Only the owner can give memory back to its
// arena; it looks for blocks that nobody holds whenever it makes a new one, and at its end leaves
// what others still hold to them (Arena::leave_to_peers): the kernel frees the pages with the last
// mapping.
// A rank that dies never lets go; its host's group has failed then anyway.
// Thread rule: any thread.
//
//   std::uint64_t offset = blocks->make(bytes, world_size);         // the owner
//   std::shared_ptr<std::byte> mine = blocks->hold(mapped_head);    // every rank, once per block

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "libddp/memory/arena.h"

namespace libddp {

class SharedBlocks : public std::enable_shared_from_this<SharedBlocks> {
 public:
  /// In front of every block's bytes.
  static constexpr std::size_t kHeadBytes = Arena::kAlignment;

  /// `mappings` keeps the peers' arenas mapped.
  SharedBlocks(std::shared_ptr<Arena> arena, std::shared_ptr<const void> mappings);
  ~SharedBlocks();
  SharedBlocks(const SharedBlocks&) = delete;
  SharedBlocks& operator=(const SharedBlocks&) = delete;

  /// Offset in the own arena of the head of a new block for `num_holders` ranks.
  std::uint64_t make(std::size_t bytes, int num_holders);
  /// The bytes behind `head`, held until the last copy of the pointer is gone.
  std::shared_ptr<std::byte> hold(std::byte* head);

 private:
  void drop_unheld();

  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<const void> mappings_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<std::byte>> made_;
};

}  // namespace libddp
