#include "libddp/ddp/slow_rank.h"

#include <algorithm>
#include <utility>

namespace libddp {
namespace {

double part(std::int64_t cost_ns, std::int64_t time_ns) {
  return static_cast<double>(cost_ns) / static_cast<double>(std::max<std::int64_t>(time_ns, 1));
}

}  // namespace

void SlowRankWatch::Window::add(Pass pass) {
  cost_ns += pass.cost_ns;
  for (Pass& dear : pauses) {
    if (pass.cost_ns > dear.cost_ns) std::swap(pass, dear);
  }
}

double SlowRankWatch::Window::share(std::int64_t time_ns) const { return part(cost_ns, time_ns); }

// Without them altogether, so that a rank that is slow in all passes has the same share as with.
double SlowRankWatch::Window::share_without_pauses(std::int64_t time_ns) const {
  std::int64_t rest_ns = cost_ns;
  for (const Pass& pause : pauses) {
    rest_ns -= pause.cost_ns;
    time_ns -= pause.time_ns;
  }
  return part(rest_ns, time_ns);
}

SlowRankWatch::SlowRankWatch(int world_size)
    : before_ns_(static_cast<std::size_t>(world_size), 0),
      windows_(static_cast<std::size_t>(world_size)) {}

std::optional<SlowRankWatch::Slow> SlowRankWatch::end_pass(
    std::int64_t now_ns, std::int64_t exposed_ns, const std::vector<std::int64_t>& waited_ns) {
  const std::int64_t time_ns = now_ns - std::exchange(end_ns_, now_ns);
  for (std::size_t rank = 0; rank < std::min(waited_ns.size(), before_ns_.size()); ++rank) {
    const std::int64_t waited = waited_ns[rank] - std::exchange(before_ns_[rank], waited_ns[rank]);
    windows_[rank].add({std::min(waited, exposed_ns), time_ns});
  }
  // The first pass begins nobody knows when.
  if (begin_ns_ == 0) {
    begin_window(now_ns);
    return std::nullopt;
  }
  if (++num_passes_ < kNumPasses) return std::nullopt;
  const auto slow = close();
  begin_window(now_ns);
  return slow;
}

std::optional<SlowRankWatch::Slow> SlowRankWatch::close() {
  const std::int64_t time_ns = end_ns_ - begin_ns_;
  shares_.resize(windows_.size());
  Slow slowest;
  for (std::size_t rank = 0; rank < windows_.size(); ++rank) {
    shares_[rank] = windows_[rank].share(time_ns);
    const double share = windows_[rank].share_without_pauses(time_ns);
    if (share > slowest.share) slowest = {static_cast<int>(rank), share};
  }
  if (slowest.share < kWorthAWord || slowest.rank == said_) return std::nullopt;
  said_ = slowest.rank;
  return slowest;
}

void SlowRankWatch::begin_window(std::int64_t now_ns) {
  std::fill(windows_.begin(), windows_.end(), Window{});
  begin_ns_ = now_ns;
  num_passes_ = 0;
}

}  // namespace libddp
