#include "libddp/ddp/parameter_usage.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "libddp/base/group_identity.h"

namespace libddp {
namespace {

/// More names than this would hide the message.
constexpr std::size_t kMaxNames = 20;

/// [world_size * parameters], rank by rank.
at::Tensor gather_usage(ProcessGroup& group, const std::vector<std::uint8_t>& unused) {
  const auto n = static_cast<std::int64_t>(unused.size());
  at::Tensor mine = at::empty({n}, at::kByte);
  std::memcpy(mine.data_ptr(), unused.data(), unused.size());
  at::Tensor all = at::empty({n * group.size()}, at::kByte);
  group.all_gather_into(all, mine, {.async = false, .timeout = {}, .label = "unused parameters"});
  return all;
}

std::string ranks_of(const std::vector<int>& ranks, int world_size) {
  if (static_cast<int>(ranks.size()) == world_size) {
    return world_size == 1 ? "" : " (all ranks)";
  }
  return fmt::format(" ({} {})", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

std::string describe_unused(ProcessGroup& group, const std::vector<std::string>& names,
                            const std::vector<std::uint8_t>& unused) {
  const at::Tensor usage = gather_usage(group, unused);
  const auto* const flags = usage.const_data_ptr<std::uint8_t>();
  std::vector<std::string> found;
  std::size_t num_unused = 0;
  for (std::size_t index = 0; index < names.size(); ++index) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group.size(); ++rank) {
      if (flags[static_cast<std::size_t>(rank) * names.size() + index] != 0) ranks.push_back(rank);
    }
    if (ranks.empty() || ++num_unused > kMaxNames) continue;
    found.push_back(fmt::format("'{}'{}", names[index], ranks_of(ranks, group.size())));
  }
  if (num_unused > kMaxNames) found.push_back(fmt::format("{} more", num_unused - kMaxNames));
  const GroupIdentity me{group.name(), group.rank(), group.size()};
  return fmt::format(
      "{} backward: {} of {} parameters got no gradient: {}. Hint: they did not take part in the "
      "loss, or were frozen or replaced after wrapping; pass find_unused_parameters=True if that "
      "is intended.",
      me.where(), num_unused, names.size(), fmt::join(found, ", "));
}

}  // namespace libddp
