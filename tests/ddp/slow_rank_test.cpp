#include "libddp/ddp/slow_rank.h"

#include "tests/support/catch.h"

using namespace libddp;

namespace {

constexpr int kWindow = SlowRankWatch::kNumPasses;

/// Passes of 10 ms, of which `exposed` are waited, all for `rank`.
std::optional<SlowRankWatch::Slow> run_passes(SlowRankWatch& watch, int num, std::int64_t exposed,
                                              int rank, std::int64_t& now,
                                              std::vector<std::int64_t>& waited) {
  std::optional<SlowRankWatch::Slow> said;
  for (int i = 0; i < num; ++i) {
    now += 10;
    // What overlaps with computation waits longer and costs nothing.
    waited[static_cast<std::size_t>(rank)] += exposed + 5;
    if (const auto slow = watch.end_pass(now, exposed, waited)) said = slow;
  }
  return said;
}

}  // namespace

TEST_CASE("a rank that costs the others much is said once", "[slow_rank]") {
  SlowRankWatch watch(4);
  std::int64_t now = 1000;
  std::vector<std::int64_t> waited(4, 0);
  REQUIRE(watch.shares().empty());
  REQUIRE_FALSE(run_passes(watch, kWindow, 4, 3, now, waited));  // the first only starts the clock
  const auto slow = run_passes(watch, 1, 4, 3, now, waited);
  REQUIRE(slow);
  REQUIRE(slow->rank == 3);
  REQUIRE(slow->share > 0.39);
  REQUIRE(slow->share < 0.41);
  REQUIRE_FALSE(run_passes(watch, kWindow, 4, 3, now, waited));
  REQUIRE(watch.shares()[3] > 0.39);
  REQUIRE(run_passes(watch, kWindow, 3, 1, now, waited)->rank == 1);
}

TEST_CASE("a rank that costs little is not worth a word", "[slow_rank]") {
  SlowRankWatch watch(2);
  std::int64_t now = 1000;
  std::vector<std::int64_t> waited(2, 0);
  REQUIRE_FALSE(run_passes(watch, 2 * kWindow + 1, 1, 1, now, waited));
  REQUIRE(watch.shares()[1] > 0.09);
  REQUIRE(watch.shares()[1] < 0.11);
  REQUIRE(watch.shares()[0] == 0.0);
}

TEST_CASE("a rank that pauses now and then is not slow", "[slow_rank]") {
  SlowRankWatch watch(2);
  std::int64_t now = 1000;
  std::vector<std::int64_t> waited(2, 0);
  // Rank 0 evaluates for the time of ten passes, and saves for that of three.
  const auto pause = [&](std::int64_t length) {
    now += length;
    return run_passes(watch, 1, length, 0, now, waited);
  };
  for (int window = 0; window < 4; ++window) {
    REQUIRE_FALSE(run_passes(watch, 10, 1, 0, now, waited));
    REQUIRE_FALSE(pause(100));
    REQUIRE_FALSE(pause(30));
    REQUIRE_FALSE(run_passes(watch, kWindow - 12, 1, 0, now, waited));
  }
  REQUIRE(watch.shares()[0] > 0.3);  // the others have waited all the same
  // Often is not now and then.
  std::optional<SlowRankWatch::Slow> slow;
  for (int pass = 0; pass < 2 * kWindow && !slow; ++pass) {
    slow = pass % 5 == 0 ? pause(40) : run_passes(watch, 1, 1, 0, now, waited);
  }
  REQUIRE(slow);
  REQUIRE(slow->rank == 0);
}
