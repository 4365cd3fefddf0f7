#include "libddp/transport/host_layout.h"

#include <algorithm>

namespace libddp {

HostLayout HostLayout::from_keys(const std::vector<std::string>& host_keys) {
  HostLayout layout;
  std::vector<std::string> known;
  for (std::size_t rank = 0; rank < host_keys.size(); ++rank) {
    const auto found = std::find(known.begin(), known.end(), host_keys[rank]);
    const auto host = static_cast<std::size_t>(found - known.begin());
    if (found == known.end()) {
      known.push_back(host_keys[rank]);
      layout.hosts.emplace_back();
    }
    layout.host_of.push_back(static_cast<int>(host));
    layout.index_of.push_back(static_cast<int>(layout.hosts[host].size()));
    layout.hosts[host].push_back(static_cast<int>(rank));
  }
  return layout;
}

int HostLayout::num_leaders() const {
  std::size_t fewest = hosts.front().size();
  for (const std::vector<int>& ranks : hosts) fewest = std::min(fewest, ranks.size());
  return static_cast<int>(fewest);
}

bool HostLayout::is_even() const {
  return std::all_of(hosts.begin(), hosts.end(), [&](const std::vector<int>& ranks) {
    return ranks.size() == hosts.front().size();
  });
}

}  // namespace libddp
