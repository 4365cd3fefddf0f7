#include "libddp/group/group_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>
#include <set>

namespace libddp {

void check_options(const CallSite& site, const ProcessGroup::Options& options) {
  if (options.world_size < 1) {
    site.refuse(fmt::format("world_size={} is not positive", options.world_size),
                "pass the number of ranks, 1 or more");
  }
  check_rank(site, "rank", options.rank);
  if (options.name.empty()) site.refuse("name is empty", "give the group a name");
  if (options.timeout.count() <= 0) {
    site.refuse(fmt::format("timeout of {} ms", options.timeout.count()),
                "pass a time greater than zero");
  }
  const std::set<int> distinct(options.global_ranks.begin(), options.global_ranks.end());
  const auto world_size = static_cast<std::size_t>(options.world_size);
  if (!options.global_ranks.empty() &&
      (options.global_ranks.size() != world_size || distinct.size() != world_size)) {
    site.refuse(fmt::format("global_ranks [{}] are not {} different ranks",
                            fmt::join(options.global_ranks, ", "), world_size),
                "pass one global rank per member, or none");
  }
}

void check_part(const CallSite& site, const std::vector<int>& ranks) {
  if (ranks.empty()) site.refuse("ranks is empty", "pass the ranks of the new group");
  for (const int rank : ranks) check_rank(site, "ranks", rank);
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
    site.refuse(fmt::format("ranks [{}] holds a rank twice", fmt::join(ranks, ", ")),
                "pass each rank once");
  }
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace libddp
