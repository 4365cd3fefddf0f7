#include "libddp/ddp/slow_rank.h"

#include <algorithm>

namespace libddp {

SlowRankWatch::SlowRankWatch(int world_size)
    : before_ns_(static_cast<std::size_t>(world_size), 0),
      cost_ns_(static_cast<std::size_t>(world_size), 0) {}

std::optional<SlowRankWatch::Slow> SlowRankWatch::end_pass(
    std::int64_t now_ns, std::int64_t exposed_ns, const std::vector<std::int64_t>& waited_ns) {
  for (std::size_t rank = 0; rank < std::min(waited_ns.size(), before_ns_.size()); ++rank) {
    const std::int64_t waited = waited_ns[rank] - before_ns_[rank];
    before_ns_[rank] = waited_ns[rank];
    cost_ns_[rank] += std::min(waited, exposed_ns);
  }
  // The first pass begins nobody knows when.
  if (begin_ns_ == 0) {
    std::fill(cost_ns_.begin(), cost_ns_.end(), 0);
    begin_ns_ = now_ns;
    return std::nullopt;
  }
  if (++num_passes_ < kNumPasses) return std::nullopt;
  return close(now_ns);
}

std::optional<SlowRankWatch::Slow> SlowRankWatch::close(std::int64_t now_ns) {
  const auto total = static_cast<double>(std::max<std::int64_t>(now_ns - begin_ns_, 1));
  shares_.resize(cost_ns_.size());
  std::transform(cost_ns_.begin(), cost_ns_.end(), shares_.begin(),
                 [total](std::int64_t cost) { return static_cast<double>(cost) / total; });
  std::fill(cost_ns_.begin(), cost_ns_.end(), 0);
  begin_ns_ = now_ns;
  num_passes_ = 0;
  const auto slowest = std::max_element(shares_.begin(), shares_.end());
  const int rank = static_cast<int>(slowest - shares_.begin());
  if (*slowest < kWorthAWord || rank == said_) return std::nullopt;
  said_ = rank;
  return Slow{rank, *slowest};
}

}  // namespace libddp
