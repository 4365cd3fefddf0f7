#include "libddp/ddp/pass_timeline.h"

#include <algorithm>
#include <utility>

namespace libddp {

void PassTimeline::set_layout(std::shared_ptr<const BucketLayout> layout) {
  layout_ = std::move(layout);
  for (PassTimes& pass : ring_) pass.buckets.reserve(layout_->buckets.size());
}

void PassTimeline::begin_pass(std::uint64_t number, std::int64_t now_ns) {
  PassTimes& pass = ring_[next_];
  pass.number = number;
  // A forward belongs to one pass; begin_forward may not have been called.
  pass.forward_end_ns = std::exchange(forward_end_ns_, 0);
  pass.forward_begin_ns = std::exchange(forward_begin_ns_, 0);
  if (pass.forward_end_ns == 0) pass.forward_begin_ns = 0;
  pass.backward_begin_ns = now_ns;
  pass.backward_end_ns = 0;
  pass.pass_end_ns = 0;
  pass.buckets.assign(layout_->buckets.size(), BucketTimes{});
  pass.layout = layout_;
}

void PassTimeline::launched(std::size_t bucket, std::int64_t now_ns) {
  BucketTimes& times = ring_[next_].buckets[bucket];
  times.launched_ns = now_ns;
  if (times.ready_ns == 0) times.ready_ns = now_ns;
}

void PassTimeline::end_pass(std::int64_t now_ns) {
  ring_[next_].pass_end_ns = now_ns;
  next_ = (next_ + 1) % kNumPasses;
  ++num_ended_;
}

std::vector<PassTimes> PassTimeline::passes() const {
  // The place of a pass that runs now was the oldest one's.
  const bool has_begun = num_ended_ >= kNumPasses && ring_[next_].pass_end_ns == 0;
  const std::size_t num_kept = std::min(num_ended_, kNumPasses) - (has_begun ? 1 : 0);
  std::vector<PassTimes> kept;
  kept.reserve(num_kept);
  for (std::size_t back = num_kept; back > 0; --back) {
    kept.push_back(ring_[(next_ + kNumPasses - back) % kNumPasses]);
  }
  return kept;
}

}  // namespace libddp
