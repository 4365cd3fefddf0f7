#include "libddp/snapshot/host_saves.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/snapshot/job_ranks.h"
#include "libddp/snapshot/rank_memory.h"
#include "libddp/snapshot/saved_version.h"

namespace libddp {
namespace {

constexpr std::chrono::minutes kPullPatience{30};

}  // namespace

void HostSaves::meet(RankMemory& memory) {
  addresses_.clear();
  // A keeper that has taken another's place has none of its copies.
  memory.turns().forget_copies();
  const auto key = given_run_key();
  const int num_hosts = ranks_.hosts().num_hosts();
  if (num_hosts == 1) {
    if (replicas_ > 0 && ranks_.rank() == 0) {
      log(LogLevel::Warn, "snapshot_without_replicas", {{"reason", "all ranks are on one host"}});
    }
    return;
  }
  std::string address;
  ranks_.together("meet the keepers of other hosts", [&] {
    if (replicas_ > 0 && !key) {
      throw ArgumentError(
          "libddp snapshot: replicas=1 sends saves to other hosts and needs a run key. Hint: start "
          "the job with --run-key-file, or set LIBDDP_RUN_KEY_FILE (docs/security.md).");
    }
    if (key && ranks_.local_rank() == 0) address = memory.listen(key);
  });
  const std::vector<std::string> all = ranks_.gather(address);
  for (int host = 0; host < num_hosts; ++host) {
    addresses_.push_back(all[static_cast<std::size_t>(ranks_.hosts().ranks_of(host).front())]);
  }
  const bool is_met = std::none_of(addresses_.begin(), addresses_.end(),
                                   [](const std::string& one) { return one.empty(); });
  if (!is_met) addresses_.clear();
}

void HostSaves::learn(const std::vector<ToldSlot>& slots) {
  saves_.clear();
  for (const ToldSlot& each : slots) {
    if (!each.is_whole()) continue;
    Save& save = saves_[key_of(each.saved(), each.generation)];
    save.slot = each;
    save.ranks.insert(each.rank);
    save.on_host.resize(static_cast<std::size_t>(ranks_.hosts().num_hosts()));
    save.on_host[static_cast<std::size_t>(ranks_.hosts().host(each.teller))].insert(each.rank);
  }
}

std::vector<std::map<int, std::size_t>> HostSaves::missing(const Save& save, bool is_alike) const {
  const HostLayout& hosts = ranks_.hosts();
  std::vector<int> all(static_cast<std::size_t>(save.slot.world_size));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::map<int, std::size_t>> missing(save.on_host.size());
  for (std::size_t host = 0; host < missing.size(); ++host) {
    for (const int rank : is_alike ? hosts.ranks_of(static_cast<int>(host)) : all) {
      if (save.on_host[host].contains(rank)) continue;
      for (std::size_t other = 0; other < missing.size(); ++other) {
        if (save.on_host[other].contains(rank)) missing[host].emplace(rank, other);
      }
    }
  }
  return missing;
}

bool HostSaves::bring(SavedVersion& version, bool all_ranks, RankMemory& memory) const {
  const auto save = saves_.find(key_of(version.saved(), version.generation()));
  if (addresses_.empty() || save == saves_.end()) return false;
  const bool is_alike = !all_ranks && version.world_size() == ranks_.size();
  const auto lacking = missing(save->second, is_alike);
  if (std::all_of(lacking.begin(), lacking.end(), [](const auto& one) { return one.empty(); })) {
    return false;
  }
  const auto& own = lacking[static_cast<std::size_t>(ranks_.hosts().host(ranks_.rank()))];
  ranks_.together(fmt::format("fetch {} from other hosts", version.name()), [&] {
    if (ranks_.local_rank() != 0) return;
    for (const auto& [rank, host] : own) {
      memory.pull(addresses_[host], rank, version.saved(), version.generation(),
                  is_alike ? PullPurpose::Own : PullPurpose::Replica);
    }
    const Deadline deadline = Deadline::after(kPullPatience);
    for (const auto& [rank, host] : own) {
      memory.wait_pull(rank, version.saved(), version.generation(), deadline);
    }
  });
  ranks_.together("look into its memory", [&] { version.find_places(memory.fetch()); });
  return true;
}

void HostSaves::replicate(RankMemory& memory) const {
  if (replicas_ == 0 || addresses_.empty()) return;
  SlotTurns& turns = memory.turns();
  const int newest = *turns.newest();
  if (turns.begin_copy()) {
    pull_replicas(newest, PullPurpose::Replica, memory);
  } else if (turns.copying() && turns.copying() != newest) {
    pull_replicas(newest, PullPurpose::NextReplica, memory);
  }
}

void HostSaves::pull_replicas(int slot, PullPurpose purpose, RankMemory& memory) const {
  if (ranks_.local_rank() != 0) return;
  const auto saved = memory.saved_in(slot);
  if (!saved) return;
  const int from = host_before();
  try {
    for (const int rank : ranks_.hosts().ranks_of(from)) {
      memory.pull(addresses_[static_cast<std::size_t>(from)], rank, *saved, memory.generation(),
                  purpose);
    }
  } catch (const Error& error) {
    // The save is whole all the same; arrival() will say that this host has no copy.
    log(LogLevel::Warn, "replica_not_pulled", {{"rank", ranks_.rank()}, {"reason", error.what()}});
  }
}

Pulled HostSaves::arrival(RankMemory& memory) const {
  const auto slot = memory.turns().copying();
  if (!slot || ranks_.local_rank() != 0) return Pulled::Here;
  const auto saved = memory.saved_in(*slot);
  if (!saved) return Pulled::Failed;
  return memory.pulled(ranks_.hosts().ranks_of(host_before()), *saved, memory.generation());
}

void HostSaves::note_arrivals(const std::vector<Pulled>& arrivals, RankMemory& memory) const {
  const auto is_any = [&](Pulled one) {
    return std::find(arrivals.begin(), arrivals.end(), one) != arrivals.end();
  };
  if (!memory.turns().copying() || is_any(Pulled::Coming)) return;
  memory.turns().end_copy(/*is_everywhere=*/!is_any(Pulled::Failed));
  replicate(memory);
}

int HostSaves::host_before() const {
  const HostLayout& hosts = ranks_.hosts();
  return (hosts.host(ranks_.rank()) + hosts.num_hosts() - 1) % hosts.num_hosts();
}

}  // namespace libddp
