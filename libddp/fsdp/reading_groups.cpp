#include "libddp/fsdp/reading_groups.h"

#include <algorithm>

namespace libddp {
namespace {

/// Whether a barrier of `group` is one of `other` too. Both have this rank, so all ranks of `other`
/// find the same.
bool covers(const Group& group, const Group& other) {
  if (group == other) return true;
  const std::vector<int>& ranks = group->global_ranks();
  const std::vector<int>& others = other->global_ranks();
  return std::all_of(others.begin(), others.end(), [&](int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
}

}  // namespace

std::vector<Group> reading_groups(const std::vector<std::shared_ptr<ParamGroup>>& units) {
  std::vector<Group> groups;
  for (const auto& unit : units) {
    if (!unit->needs_barrier()) continue;
    const Group& own = unit->options().shard;
    const auto covers_own = [&](const Group& group) { return covers(group, own); };
    if (std::any_of(groups.begin(), groups.end(), covers_own)) continue;
    std::erase_if(groups, [&](const Group& group) { return covers(own, group); });
    groups.push_back(own);
  }
  return groups;
}

void meet_readers(const std::vector<std::shared_ptr<ParamGroup>>& units,
                  const CallOptions& options) {
  for (const Group& group : reading_groups(units)) group->barrier(options);
}

}  // namespace libddp
