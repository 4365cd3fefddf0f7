#include "libddp/ddp/slow_rank_report.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/log.h"

namespace libddp {

SlowRankReport::SlowRankReport(Group group) : group_(std::move(group)), watch_(group_->size()) {}

// The lowest of the ranks that wait speaks for all: what they wait for is the same.
void SlowRankReport::end_pass(const PassTimeline& timeline) {
  group_->waits(waited_ns_);
  const std::int64_t exposed = timeline.last_exposed_ns() + std::exchange(exposed_before_ns_, 0);
  const auto slow = watch_.end_pass(timeline.last_end_ns(), exposed, waited_ns_);
  if (!slow || group_->rank() != (slow->rank == 0 ? 1 : 0)) return;
  log(LogLevel::Warn, "slow_rank",
      {{"group", group_->name()},
       {"slow_rank", slow->rank},
       {"others_waited", fmt::format("{:.0f}%", 100.0 * slow->share)},
       {"steps", SlowRankWatch::kNumPasses}});
}

}  // namespace libddp
