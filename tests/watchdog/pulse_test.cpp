#include "libddp/watchdog/pulse.h"

#include <chrono>
#include <cstdint>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/heartbeat_timeout.h"

using namespace libddp;
using namespace libddp::test;
using Verdict = Pulse::Verdict;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

}  // namespace

TEST_CASE("a pulse is judged by when its beats were seen", "[liveness]") {
  Pulse pulse(std::chrono::seconds(5));
  REQUIRE(pulse.judge(100 * kSecond) == Verdict::Alive);  // never beaten: still joining
  pulse.observe(1, 1 * kSecond);
  pulse.observe(1, 3 * kSecond);
  REQUIRE(pulse.judge(3 * kSecond) == Verdict::Alive);
  REQUIRE(pulse.is_doubtful(3 * kSecond));
  REQUIRE(pulse.judge(4 * kSecond) == Verdict::Silent);
  REQUIRE(pulse.judge(5 * kSecond) == Verdict::Alive);  // said once
  pulse.observe(2, 5 * kSecond);
  REQUIRE(pulse.judge(5 * kSecond) == Verdict::Back);
  REQUIRE(pulse.judge(10 * kSecond) == Verdict::Dead);
  REQUIRE(pulse.judge(11 * kSecond) == Verdict::Alive);
}

TEST_CASE("an observer that was away forgives", "[liveness]") {
  Pulse pulse(std::chrono::seconds(5));
  pulse.forgive(1 * kSecond);
  REQUIRE(pulse.silence(2 * kSecond).count() == 0);
  pulse.observe(1, 1 * kSecond);
  pulse.forgive(60 * kSecond);
  REQUIRE(pulse.judge(61 * kSecond) == Verdict::Alive);
  REQUIRE(pulse.judge(65 * kSecond) == Verdict::Dead);
}

TEST_CASE("the heartbeat's timeout comes from the environment", "[liveness]") {
  REQUIRE(heartbeat_timeout() == std::chrono::seconds(5));
  {
    const HeartbeatTimeout off("0");
    REQUIRE_FALSE(heartbeat_timeout());
    REQUIRE(Pulse(heartbeat_timeout()).judge(1) == Verdict::Alive);
  }
  const HeartbeatTimeout bad("soon");
  REQUIRE_THROWS_AS(heartbeat_timeout(), ArgumentError);
}
