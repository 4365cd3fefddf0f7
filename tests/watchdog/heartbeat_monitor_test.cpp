#include "libddp/watchdog/heartbeat_monitor.h"

#include <chrono>
#include <cstdint>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/heartbeat_timeout.h"

using namespace libddp;
using namespace libddp::test;
using Verdict = HeartbeatMonitor::Verdict;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

}  // namespace

TEST_CASE("a heartbeat monitor is judged by when its beats were seen", "[liveness]") {
  HeartbeatMonitor heartbeat(std::chrono::seconds(5));
  REQUIRE(heartbeat.judge(100 * kSecond) == Verdict::Alive);  // never beaten: still joining
  heartbeat.observe(1, 1 * kSecond);
  heartbeat.observe(1, 3 * kSecond);
  REQUIRE(heartbeat.judge(3 * kSecond) == Verdict::Alive);
  REQUIRE(heartbeat.is_doubtful(3 * kSecond));
  REQUIRE(heartbeat.judge(4 * kSecond) == Verdict::Silent);
  REQUIRE(heartbeat.judge(5 * kSecond) == Verdict::Alive);  // said once
  heartbeat.observe(2, 5 * kSecond);
  REQUIRE(heartbeat.judge(5 * kSecond) == Verdict::Back);
  REQUIRE(heartbeat.judge(10 * kSecond) == Verdict::Dead);
  REQUIRE(heartbeat.judge(11 * kSecond) == Verdict::Alive);
}

TEST_CASE("an observer that was away forgives", "[liveness]") {
  HeartbeatMonitor heartbeat(std::chrono::seconds(5));
  heartbeat.forgive(1 * kSecond);
  REQUIRE(heartbeat.silence(2 * kSecond).count() == 0);
  heartbeat.observe(1, 1 * kSecond);
  heartbeat.forgive(60 * kSecond);
  REQUIRE(heartbeat.judge(61 * kSecond) == Verdict::Alive);
  REQUIRE(heartbeat.judge(65 * kSecond) == Verdict::Dead);
}

TEST_CASE("the heartbeat's timeout comes from the environment", "[liveness]") {
  REQUIRE(heartbeat_timeout() == std::chrono::seconds(5));
  {
    const HeartbeatTimeout off("0");
    REQUIRE_FALSE(heartbeat_timeout());
    REQUIRE(HeartbeatMonitor(heartbeat_timeout()).judge(1) == Verdict::Alive);
  }
  const HeartbeatTimeout bad("soon");
  REQUIRE_THROWS_AS(heartbeat_timeout(), ArgumentError);
}
