#pragma once

// The memories that a keeper holds: of each rank of its host the newest layout, and the one before
// it until the newest has a slot that is whole. Thread rule: one at a time (the keeper's mutex).
//
//   memories.put(SlotMemory::open(std::move(fd)));
//   for (const auto& memory : memories.all()) pass_on(memory->fd());

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "libddp/slots/slot_memory.h"

namespace libddp {

class KeptMemories {
 public:
  using Memory = std::shared_ptr<SlotMemory>;

  /// In place of one of the same rank and generation. One of another number of ranks ends those
  /// that are there: the job has started anew with it.
  void put(SlotMemory memory);
  /// Lets go what a newer layout has replaced.
  void forget_old();
  Memory find(int rank, std::uint64_t generation) const;
  /// By rank, older layouts first.
  std::vector<Memory> all() const;
  bool is_empty() const { return by_rank_.empty(); }
  void clear() { by_rank_.clear(); }

  /// A slot of each rank that has memory here, all of one save.
  struct Common {
    SavedStep saved;
    std::vector<std::pair<Memory, int>> slots;
  };
  /// The newest save that all of them have whole; nothing if there is none.
  std::optional<Common> newest_common() const;

 private:
  std::map<int, std::map<std::uint64_t, Memory>> by_rank_;
};

}  // namespace libddp
