#pragma once

// Which slot of its memory a rank's next save takes: the same one on all ranks.
//
// NOTE [What the hosts have in common]
// A save is copied to the next host behind the training. When a host is lost, the job goes on from
// a save that the hosts that are left have in their own slots and of which the next host has the
// lost one's copy. So all hosts copy the same save, the next one begins when it has arrived on all
// of them, and two slots are taken last: that of the save on its way, and that of the one that
// arrived before it, which is what they have in common until then. Where saves come faster than
// copies, that leaves no slot but the spare one, whose pages cost nothing before.
//
// Knows numbers only: nothing here waits or asks. Thread rule: one thread.
//
//   SlotTurns turns;
//   for (const int slot : turns.candidates(/*may_use_spare=*/false)) ...    // the best first
//   turns.take(slot);  ...  turns.fill(slot);
//   if (turns.begin_copy()) pull(turns.copying());  ...  turns.end_copy(/*is_everywhere=*/true);

#include <optional>
#include <vector>

namespace libddp {

class SlotTurns {
 public:
  /// A memory that is new, or one whose newest save is in that slot.
  void restart(std::optional<int> newest);

  /// The save that was whole on all ranks last.
  std::optional<int> newest() const;
  /// What the next save may take, the best first: all but the spare slot if that is unused and it
  /// may not be used.
  std::vector<int> candidates(bool may_use_spare) const;
  /// Whether only the unused spare slot would leave the hosts what they have in common, and the
  /// newest save.
  bool needs_spare() const;
  /// Its save is lost from now on.
  void take(int slot);
  /// All ranks have filled it.
  void fill(int slot);

  /// The save that is on its way to the next hosts.
  std::optional<int> copying() const { return copying_; }
  /// The newest save is, from now on. False if another one is, or it has arrived already.
  bool begin_copy();
  /// It is not any more. One that did not arrive everywhere leaves the one before it in its place,
  /// but not twice: where a host has no room for copies the others still have theirs.
  void end_copy(bool is_everywhere);
  /// Of no save anybody knows whether it has been copied.
  void forget_copies();

 private:
  bool is_kept(int slot) const { return slot == copying_ || slot == copied_; }
  bool is_used(int slot) const;

  /// Slots with saves, the oldest first.
  std::vector<int> used_;
  std::optional<int> copying_;
  std::optional<int> copied_;
  /// The last copy did not arrive everywhere.
  bool has_failed_ = false;
};

}  // namespace libddp
