#pragma once

// A rank's place in its host's keeper: the connection, the memory that this rank writes, and what
// is being stored of it. A keeper that has died is replaced by a new one, which gets the memory.
// Thread rule: one thread at a time.
//
//   RankMemory memory({.run = run}, {.run = run, .rank = 0, .world_size = 2}, storage);
//   const RankMemory::Offer offer = memory.offer(pieces, values.size());
//   ...                                       // all ranks agree on a slot, see snapshot.cpp
//   memory.fill(slot, saved, pieces, values, num_threads);
//   memory.commit(slot);

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libddp/bootstrap/run_key.h"
#include "libddp/keeper/keeper_client.h"
#include "libddp/keeper/pull.h"
#include "libddp/keeper/start_keeper.h"
#include "libddp/memory/prefault.h"
#include "libddp/slots/slot_memory.h"
#include "libddp/snapshot/own_pieces.h"
#include "libddp/snapshot/slot_turns.h"

namespace libddp {

class RankMemory {
 public:
  static constexpr std::size_t kSlots = SlotMemory::kSlots;

  /// What this rank could do for the next save.
  struct Offer {
    /// There is no memory, or one of another layout.
    bool needs_memory = false;
    /// Of what it would make, without the spare slot.
    std::uint64_t bytes_needed = 0;
    /// Reserved: nobody reads them until withdraw().
    std::array<bool, kSlots> can_write{};
    /// Nothing of it is being stored.
    bool is_stored = true;
    /// The keeper is another one, at another address, than when this was asked last.
    bool has_moved = false;
  };

  /// Room for values of so many bytes, which may grow.
  static std::uint64_t values_capacity(std::size_t values_bytes);

  /// Meets the keeper, or starts it. `identity.generation` means nothing yet.
  RankMemory(KeeperStart start, SlotIdentity identity, std::optional<KeeperStorage> storage);
  ~RankMemory() { stop_prefault(); }
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  /// All that the keeper holds for this host; damaged ones are left out with a line in the log.
  /// What the call before has mapped is not mapped again: that takes longer than to copy it.
  std::vector<std::shared_ptr<SlotMemory>> fetch();
  /// Goes on with a memory of fetch(), in which `slot` is the newest that all ranks have.
  void adopt(const std::shared_ptr<SlotMemory>& memory, int slot);

  Offer offer(const OwnPieces& own, std::size_t values_bytes);
  /// Of all slots, but for one that is to be written.
  void withdraw(std::optional<int> except = std::nullopt);
  /// A memory for these pieces in place of the one before, which the keeper has until this one is
  /// whole on all ranks.
  /// `reserved`: as SlotMemory::create takes it.
  void make(const OwnPieces& own, std::size_t values_bytes, std::uint64_t generation,
            SharedSegment reserved);
  /// Its turns, which are the same on all ranks.
  const SlotTurns& turns() const { return turns_; }
  SlotTurns& turns() { return turns_; }
  /// REQUIRES that it is reserved, or fresh.
  void fill(int slot, const SavedStep& saved, const OwnPieces& own, std::string_view values,
            int num_threads);
  /// All ranks have filled it.
  void commit(int slot);
  /// Stores the slot that commit() has named.
  void store();
  /// Where the save that store() was called for lies; nothing if there was none in this memory.
  std::optional<int> stored_slot() const { return stored_slot_; }
  std::uint64_t data_bytes() const { return memory_ ? memory_->layout().data_bytes() : 0; }

  /// From now on keepers of other hosts may fetch from this one; returns where. `key`: the run's.
  std::string listen(std::shared_ptr<const RunKey> key);
  /// The keeper begins to fetch a save of a rank from another host's keeper.
  void pull(const std::string& address, int rank, const SavedStep& saved, std::uint64_t generation,
            PullPurpose purpose);
  /// Whether it has that save of all of these ranks.
  Pulled pulled(const std::vector<int>& ranks, const SavedStep& saved, std::uint64_t generation);
  /// Until that is here. Throws SnapshotError if it cannot be had, TimeoutError.
  void wait_pull(int rank, const SavedStep& saved, std::uint64_t generation, Deadline deadline);
  /// Of the memory that is written.
  std::uint64_t generation() const { return memory_->identity().generation; }
  /// Nothing for a slot that is not whole.
  std::optional<SavedStep> saved_in(int slot) const { return memory_->slot(slot).whole(); }

  /// Until the last store() is done. Throws SnapshotError if it failed, TimeoutError.
  void wait(Deadline deadline);
  void finish();
  std::string status();

 private:
  void connect();
  /// One that this process has mapped; null for another.
  std::shared_ptr<SlotMemory> mapped(int fd) const;
  void start_prefault(int slot);
  void stop_prefault();
  template <typename Call>
  auto with_keeper(Call&& call);

  const KeeperStart start_;
  const SlotIdentity identity_;
  const std::optional<KeeperStorage> storage_;
  /// As it was at the start: whoever takes its children over is no agent.
  const pid_t agent_;
  std::optional<KeeperClient> keeper_;
  std::shared_ptr<SlotMemory> memory_;
  /// Of fetch(), other ranks' too, as long as nobody makes new ones.
  std::vector<std::shared_ptr<SlotMemory>> fetched_;
  /// Of the slot that has not been written yet.
  std::shared_ptr<PrefaultJob> prefault_;
  /// What memory_ was made for, to compare the next save with.
  std::vector<Piece> pieces_;
  SlotTurns turns_;
  std::optional<int> stored_slot_;
  /// Of the last store(); nothing when it is known to be done.
  std::optional<std::uint64_t> storing_;
  std::uint64_t last_stored_ = 0;
  /// Of listen(); null where nobody listens.
  std::shared_ptr<const RunKey> key_;
  bool has_moved_ = false;
};

}  // namespace libddp
