#pragma once

// What each host of a job has of the saves in memory, and how a save gets from one host to another:
// the keepers of the hosts fetch from each other, as far as they have the job's run key.
// Thread rule: one thread; meet() and bring() are collectives.
//
//   HostSaves saves(ranks, /*replicas=*/1);
//   saves.meet(memory);
//   saves.learn(told_slots_of(ranks.gather(tell_slots(memory.fetch()))));
//   saves.bring(version, /*all_ranks=*/false, memory);   // to where it is missing
//   saves.replicate(saved, memory);                      // to the next host, behind the training

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "libddp/snapshot/told_slots.h"

namespace libddp {

class JobRanks;
class RankMemory;
class SavedVersion;

class HostSaves {
 public:
  /// Sequence, generation, start and step. The first two are not enough: two parts of a job that
  /// went on apart count alike, and one memory may have gone on in both.
  using Key = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::int64_t>;
  struct Save {
    /// One of its slots.
    ToldSlot slot;
    /// Whose memory some host has; and each host.
    std::set<int> ranks;
    std::vector<std::set<int>> on_host;

    /// It counts where the hosts together have all of its ranks.
    bool is_whole() const { return static_cast<int>(ranks.size()) == slot.world_size; }
  };

  HostSaves(const JobRanks& ranks, int replicas) : ranks_(ranks), replicas_(replicas) {}

  /// Lets the keepers of all hosts find each other, where there is a run key.
  void meet(RankMemory& memory);
  /// Who has what.
  void learn(const std::vector<ToldSlot>& slots);
  /// What learn() has found, the oldest first.
  const std::map<Key, Save>& saves() const { return saves_; }
  /// Fetches the memories of ranks that are on a host now, or of all ranks, from the hosts that
  /// have them. False where nothing was to be fetched, or cannot be.
  bool bring(SavedVersion& version, bool all_ranks, RankMemory& memory) const;
  /// The next host's keeper begins to fetch it.
  void replicate(const SavedStep& saved, RankMemory& memory) const;

 private:
  static Key key_of(const SavedStep& saved, std::uint64_t generation) {
    return {saved.sequence, generation, saved.start, saved.step};
  }
  /// For each host: rank -> host that has its memory. On all ranks the same, so that they agree
  /// without asking.
  std::vector<std::map<int, std::size_t>> missing(const Save& save, bool is_alike) const;

  const JobRanks& ranks_;
  const int replicas_;
  /// Of the hosts' keepers; empty where they do not meet.
  std::vector<std::string> addresses_;
  std::map<Key, Save> saves_;
};

}  // namespace libddp
