#include "libddp/ddp/pass_timeline.h"

#include <algorithm>

#include "tests/support/catch.h"

namespace libddp {
namespace {

constexpr std::uint64_t kKept = PassTimeline::kNumPasses;

std::shared_ptr<const BucketLayout> layout_of(std::size_t num_buckets) {
  BucketLayout layout;
  layout.buckets.resize(num_buckets);
  return std::make_shared<const BucketLayout>(std::move(layout));
}

/// Pass `number` with all its events, at the times number * 1000 + 1, 2, ...
void record(PassTimeline& timeline, std::uint64_t number, std::size_t num_buckets) {
  std::int64_t now = static_cast<std::int64_t>(number) * 1000;
  timeline.begin_forward(++now);
  timeline.end_forward(++now);
  timeline.begin_pass(number, ++now);
  for (std::size_t bucket = 0; bucket < num_buckets; ++bucket) {
    timeline.ready(bucket, ++now);
    timeline.launched(bucket, ++now);
    timeline.done(bucket, ++now);
  }
  timeline.end_backward(++now);
  timeline.end_pass(++now);
}

TEST_CASE("a pass keeps each of its times", "[pass_timeline]") {
  PassTimeline timeline;
  timeline.set_layout(layout_of(2));
  CHECK(timeline.passes().empty());
  record(timeline, 1, 2);

  const std::vector<PassTimes> passes = timeline.passes();
  REQUIRE(passes.size() == 1);
  const PassTimes& pass = passes.front();
  CHECK(pass.number == 1);
  CHECK(pass.forward_begin_ns == 1001);
  CHECK(pass.forward_end_ns == 1002);
  CHECK(pass.backward_begin_ns == 1003);
  REQUIRE(pass.buckets.size() == 2);
  CHECK(pass.buckets[0].ready_ns == 1004);
  CHECK(pass.buckets[0].launched_ns == 1005);
  CHECK(pass.buckets[0].done_ns == 1006);
  CHECK(pass.buckets[1].done_ns == 1009);
  CHECK(pass.backward_end_ns == 1010);
  CHECK(pass.pass_end_ns == 1011);
  CHECK(pass.layout == timeline.layout());
}

TEST_CASE("the ring keeps the last passes, oldest first", "[pass_timeline]") {
  const std::uint64_t num_passes =
      GENERATE(as<std::uint64_t>{}, 1, kKept - 1, kKept, kKept + 1, 3 * kKept + 5);
  PassTimeline timeline;
  timeline.set_layout(layout_of(1));
  for (std::uint64_t number = 1; number <= num_passes; ++number) record(timeline, number, 1);

  const std::vector<PassTimes> passes = timeline.passes();
  REQUIRE(passes.size() == std::min(num_passes, kKept));
  const std::uint64_t first = num_passes - passes.size() + 1;
  for (std::size_t i = 0; i < passes.size(); ++i) CHECK(passes[i].number == first + i);
}

TEST_CASE("a pass that never ended leaves no record", "[pass_timeline]") {
  const std::uint64_t num_before = GENERATE(as<std::uint64_t>{}, 0, 3, kKept);
  PassTimeline timeline;
  timeline.set_layout(layout_of(2));
  for (std::uint64_t number = 1; number <= num_before; ++number) record(timeline, number, 2);
  timeline.begin_pass(100);
  timeline.ready(0);
  timeline.launched(0);
  for (const PassTimes& pass : timeline.passes()) CHECK(pass.number <= num_before);

  timeline.begin_pass(101, 5);
  timeline.end_backward(6);
  timeline.end_pass(7);
  const std::vector<PassTimes> passes = timeline.passes();
  CHECK(passes.size() == std::min(num_before + 1, kKept));
  CHECK(passes.back().number == 101);
  CHECK(passes.back().buckets[0].ready_ns == 0);
}

TEST_CASE("a pass has the shape of the buckets that it ran with", "[pass_timeline]") {
  PassTimeline timeline;
  const auto before = layout_of(1);
  const auto after = layout_of(3);
  timeline.set_layout(before);
  record(timeline, 1, 1);
  timeline.set_layout(after);
  record(timeline, 2, 3);

  const std::vector<PassTimes> passes = timeline.passes();
  REQUIRE(passes.size() == 2);
  CHECK(passes[0].buckets.size() == 1);
  CHECK(passes[0].layout == before);
  CHECK(passes[1].buckets.size() == 3);
  CHECK(passes[1].layout == after);
}

TEST_CASE("what is sent unready was ready then", "[pass_timeline]") {
  PassTimeline timeline;
  timeline.set_layout(layout_of(1));
  timeline.begin_pass(1, 10);
  timeline.launched(0, 20);
  timeline.end_pass(30);
  CHECK(timeline.passes().front().buckets[0].ready_ns == 20);
}

TEST_CASE("a forward belongs to one pass", "[pass_timeline]") {
  PassTimeline timeline;
  timeline.set_layout(layout_of(1));
  record(timeline, 1, 1);
  timeline.begin_pass(2, 5000);
  timeline.end_pass(5001);
  CHECK(timeline.passes().back().forward_begin_ns == 0);
  CHECK(timeline.passes().back().forward_end_ns == 0);
}

}  // namespace
}  // namespace libddp
