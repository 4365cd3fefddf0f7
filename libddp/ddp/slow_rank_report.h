#pragma once

// Says in the log which rank the others wait for (slow_rank.h): one rank of the group for all.
//
// Thread rule: one thread.
//
//   SlowRankReport report(group);
//   report.add_exposed(ns);          // a collective before the pass, which nothing overlapped with
//   report.end_pass(timeline);

#include <cstdint>
#include <vector>

#include "libddp/ddp/pass_timeline.h"
#include "libddp/ddp/slow_rank.h"
#include "libddp/group/process_group.h"

namespace libddp {

class SlowRankReport {
 public:
  explicit SlowRankReport(Group group);

  void add_exposed(std::int64_t ns) { exposed_before_ns_ += ns; }
  void end_pass(const PassTimeline& timeline);
  const std::vector<double>& shares() const { return watch_.shares(); }

 private:
  const Group group_;
  SlowRankWatch watch_;
  std::vector<std::int64_t> waited_ns_;
  std::int64_t exposed_before_ns_ = 0;
};

}  // namespace libddp
