#include "libddp/ddp/bucket_launcher.h"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"

namespace libddp {

BucketLauncher::BucketLauncher(Group group, Parts parts, bool skips_unused)
    : group_(std::move(group)), parts_(parts), skips_unused_(skips_unused) {}

void BucketLauncher::launch_complete() {
  BackwardPass& pass = parts_.pass;
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!pass.is_last_next() && pass.is_ready(pass.num_sent())) launch(pass.take_next(), true);
}

void BucketLauncher::launch_rest(bool last_is_async) {
  BackwardPass& pass = parts_.pass;
  if (pass.are_all_sent() && pass.num_sent() > 0) return;  // by hand, before
  parts_.timeline.end_backward();
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!pass.are_all_sent()) {
    const bool is_last = pass.is_last_next();
    launch(pass.take_next(), last_is_async || !is_last);
  }
}

void BucketLauncher::launch(std::size_t bucket, bool async) {
  GradientBuckets& buckets = parts_.buckets.current();
  const bool is_read = parts_.reduction.reads_buckets() || checks_gradients_;
  parts_.usage.fill(buckets, bucket, is_read);
  if (checks_gradients_) refuse_non_finite(bucket);
  parts_.timeline.launched(bucket);
  const bool is_skipped = skips_unused_ && !parts_.usage.is_any_used(buckets.members(bucket));
  const bool is_in_flight =
      !is_skipped &&
      parts_.reduction.start(buckets, bucket, parts_.parameters,
                             {.async = async, .scatters = parts_.buckets.scatters_averages()});
  if (!is_in_flight) parts_.timeline.done(bucket);
}

// The abort tells all ranks in the same step; nobody averages what is no number.
void BucketLauncher::refuse_non_finite(std::size_t bucket) {
  const GradientBuckets& buckets = parts_.buckets.current();
  const auto index = first_non_finite(buckets, bucket);
  if (!index) return;
  const std::string what =
      fmt::format("the gradient of parameter '{}' ({}) on rank {} is NaN or infinite",
                  parts_.parameters[*index].name, buckets.label(bucket), group_->rank());
  group_->abort(what + ". Hint: look at that rank's batch and loss");
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  throw StateError(fmt::format(
      "{} backward: {}. Hint: look at this rank's batch and loss; LIBDDP_NAN_CHECK=off averages it "
      "all the same.",
      me.where(), what));
}

bool BucketLauncher::collect() {
  GradientBuckets& buckets = parts_.buckets.current();
  parts_.reduction.finish(
      buckets, [this](std::size_t bucket, std::int64_t ns) { parts_.timeline.done(bucket, ns); });
  if (!parts_.reduction.averages_flags(buckets, parts_.buckets.scatters_averages())) {
    return parts_.usage.share(buckets, parts_.buckets.order().is_learning());
  }
  return is_any_missing(buckets);
}

}  // namespace libddp
