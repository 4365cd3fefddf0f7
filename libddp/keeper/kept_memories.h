#pragma once

// The memories that a keeper holds: those of the newest layout (generation), and those of the one
// before it until all ranks of the host have a save of the newest: at every moment one save is
// whole on all of them, also while layouts or the number of ranks change. Thread rule: one at a
// time (the keeper's thread).
//
//   memories.put(SlotMemory::open(std::move(fd)));
//   for (const auto& memory : memories.all()) pass_on(memory->fd());

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "libddp/slots/slot_memory.h"

namespace libddp {

class KeptMemories {
 public:
  using Memory = std::shared_ptr<SlotMemory>;

  /// In place of one of the same rank and generation. REQUIRES that all ranks put their memory of a
  /// generation before one of them fills it.
  void put(SlotMemory memory);
  /// Lets go what a newer generation has replaced, and those that starts have left which died
  /// before their first save.
  void forget_old();
  Memory find(int rank, std::uint64_t generation) const;
  /// A rank that has come to its end needs none.
  void forget_rank(int rank);
  /// Older generations first, by rank.
  std::vector<Memory> all() const;
  bool is_empty() const { return generations_.empty(); }

  /// A slot of each rank that has memory of a generation here, all of one save.
  struct Common {
    SavedStep saved;
    std::vector<std::pair<Memory, int>> slots;
  };
  /// The newest save that all of them have whole, one that is complete before those that are not;
  /// nothing if there is none.
  std::optional<Common> newest_common() const;

  /// The save is whole on all ranks of the job, on other hosts, too.
  void note_complete(std::uint64_t sequence);
  /// The last few such saves.
  const std::set<std::uint64_t>& complete() const { return complete_; }

 private:
  using ByRank = std::map<int, Memory>;
  /// The saves that all of them have whole, by sequence.
  static std::map<std::uint64_t, Common> common_of(const ByRank& memories);

  std::map<std::uint64_t, ByRank> generations_;
  std::set<std::uint64_t> complete_;
};

}  // namespace libddp
