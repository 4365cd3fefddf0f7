#pragma once

// How the ranks of a communicator wait, and where small becomes large: both follow from the
// question whether every rank can have a core of its own.
//
// All ranks compute the policy from the same masks, so they agree on it.
// Thread rule: immutable value.
//
//   WaitPolicy policy = WaitPolicy::choose({"3", "3"});   // two ranks that share CPUs 0 and 1

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace libddp {

struct WaitPolicy {
  /// More ranks than CPUs: a spinning rank keeps the one it waits for from running.
  bool oversubscribed = false;
  /// Rounds of `pause` before the rank sleeps. There is no sched_yield between the two: since Linux
  /// 6.18 a yield gives up a whole time slice, which under load made a barrier a hundred times
  /// slower than going to sleep at once.
  int spins = 0;
  /// Up to here every payload travels in the slot.
  std::size_t inline_bytes = 0;
  /// The same for memory outside the arena, where the alternative costs two copies.
  std::size_t ordinary_inline_bytes = 0;
  /// Staging chunk. Large ones save barriers, small ones stay in the cache.
  std::size_t chunk_bytes = 0;

  /// From the affinity masks of all ranks. Empty or unreadable text counts as "one CPU".
  static WaitPolicy choose(const std::vector<std::string>& cpu_masks);
};

/// CPUs of this process: the affinity mask in hexadecimal, lowest CPU last ("3" = CPUs 0 and 1).
/// Under a container's CPU quota only as many of them as the quota pays for, the lowest ones, so
/// that the union over the ranks of a container counts the quota.
std::string own_cpu_mask_text();

/// CPUs that the text of a cgroup's cpu.max grants ("150000 100000" = 2, rounded up); nullopt for
/// "max" and for text that says nothing.
std::optional<int> cpu_quota(const std::string& cpu_max);

/// Number of CPUs in the union of masks.
int count_cpus(const std::vector<std::string>& cpu_masks);

}  // namespace libddp
