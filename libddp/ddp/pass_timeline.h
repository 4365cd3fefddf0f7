#pragma once

// When what happened in the last passes that synchronised: a ring of records, always on. An event
// costs one clock read; once the buckets have their final shape, nothing allocates.
//
// A pass that never ends (backward raised) leaves no record.
// Thread rule: one forward or backward at a time, and readers between them. `ready` and `launched`
// of different buckets may run at the same time.
//
//   PassTimeline timeline;
//   timeline.set_layout(layout);
//   timeline.begin_pass(1);
//   timeline.ready(0);
//   timeline.launched(0);
//   timeline.done(0);
//   timeline.end_backward();
//   timeline.end_pass();
//   timeline.passes().back().buckets[0].done_ns;

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "libddp/base/monotonic_clock.h"
#include "libddp/ddp/bucket_layout.h"

namespace libddp {

// All times: nanoseconds of monotonic_ns().

/// ready <= launched <= done.
struct BucketTimes {
  /// All gradients are there. What the end of the pass had to wait for is ready when it is sent.
  std::int64_t ready_ns = 0;
  /// Its communication was handed over. It begins when that of the buckets before is done.
  std::int64_t launched_ns = 0;
  /// Its communication ended, whether somebody waited for it or not; with a communication hook:
  /// its result was taken.
  std::int64_t done_ns = 0;
};

struct PassTimes {
  /// Counts the passes of this model that synchronise, from 1.
  std::uint64_t number = 0;
  /// The last forward before the pass; 0 where it is not known.
  std::int64_t forward_begin_ns = 0;
  std::int64_t forward_end_ns = 0;
  /// This rank's own computation; what comes after it is waiting for the last buckets.
  std::int64_t backward_begin_ns = 0;
  std::int64_t backward_end_ns = 0;
  std::int64_t pass_end_ns = 0;
  std::vector<BucketTimes> buckets;
  /// What the buckets were in this pass.
  std::shared_ptr<const BucketLayout> layout;
};

class PassTimeline {
 public:
  /// Passes that are kept.
  static constexpr std::size_t kNumPasses = 32;

  /// What the buckets of the passes to come are. Between passes.
  void set_layout(std::shared_ptr<const BucketLayout> layout);
  const std::shared_ptr<const BucketLayout>& layout() const { return layout_; }

  void begin_forward(std::int64_t now_ns = monotonic_ns()) { forward_begin_ns_ = now_ns; }
  void end_forward(std::int64_t now_ns = monotonic_ns()) { forward_end_ns_ = now_ns; }

  /// Takes the place of a pass that never ended. REQUIRES: a layout.
  void begin_pass(std::uint64_t number, std::int64_t now_ns = monotonic_ns());
  void ready(std::size_t bucket, std::int64_t now_ns = monotonic_ns()) {
    ring_[next_].buckets[bucket].ready_ns = now_ns;
  }
  void launched(std::size_t bucket, std::int64_t now_ns = monotonic_ns());
  void done(std::size_t bucket, std::int64_t now_ns = monotonic_ns()) {
    ring_[next_].buckets[bucket].done_ns = now_ns;
  }
  void end_backward(std::int64_t now_ns = monotonic_ns()) { ring_[next_].backward_end_ns = now_ns; }
  void end_pass(std::int64_t now_ns = monotonic_ns());

  /// When the last pass ended, and how long that end had to wait for the last buckets.
  std::int64_t last_end_ns() const { return last().pass_end_ns; }
  std::int64_t last_exposed_ns() const { return last().pass_end_ns - last().backward_end_ns; }

  /// Those that ended, oldest first.
  std::vector<PassTimes> passes() const;

 private:
  const PassTimes& last() const { return ring_[(next_ + kNumPasses - 1) % kNumPasses]; }

  std::shared_ptr<const BucketLayout> layout_;
  std::int64_t forward_begin_ns_ = 0;
  std::int64_t forward_end_ns_ = 0;
  std::array<PassTimes, kNumPasses> ring_;
  /// Where the pass that runs, or the next one, is written; how many have ended.
  std::size_t next_ = 0;
  std::size_t num_ended_ = 0;
};

}  // namespace libddp
