#pragma once

// What each host of a job has of the saves in memory, and how a save gets from one host to another:
// the keepers of the hosts fetch from each other, as far as they have the job's run key.
// Thread rule: one thread; meet() and bring() are collectives.
//
//   HostSaves saves(ranks, /*replicas=*/1);
//   saves.meet(memory);
//   saves.learn(told_slots_of(ranks.gather(tell_slots(memory.fetch()))));
//   saves.bring(version, /*all_ranks=*/false, memory);   // to where it is missing
//   saves.replicate(memory);                             // to the next host, behind the training
//   saves.note_arrivals(ranks.gather(saves.arrival(memory)), memory);

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "libddp/keeper/pull.h"
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
  /// The newest save goes to the next host's keeper: now, or when the one that is on its way is on
  /// all hosts. What fails there is a line in the log.
  void replicate(RankMemory& memory) const;
  /// Whether this host has what is on its way to it.
  Pulled arrival(RankMemory& memory) const;
  /// What all ranks have said to that. Where all have it, or some never will, the newest one is
  /// next.
  void note_arrivals(const std::vector<Pulled>& arrivals, RankMemory& memory) const;

 private:
  static Key key_of(const SavedStep& saved, std::uint64_t generation) {
    return {saved.sequence, generation, saved.start, saved.step};
  }
  /// Lets this host's keeper fetch it.
  void pull_replicas(int slot, PullPurpose purpose, RankMemory& memory) const;
  /// The host that this one has copies of.
  int host_before() const;
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
