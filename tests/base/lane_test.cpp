#include "libddp/base/lane.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("a lane gives numbers in order and runs one at a time", "[lane]") {
  std::vector<std::uint64_t> order;
  {
    Lane lane("test-lane");
    REQUIRE(lane.is_idle());
    REQUIRE(lane.try_begin() == 1u);
    REQUIRE_FALSE(lane.try_begin().has_value());
    for (int i = 0; i < 100; ++i) {
      lane.enqueue([&](std::uint64_t sequence) {
        return [&order, sequence] { order.push_back(sequence); };
      });
    }
    REQUIRE(order.empty());  // the turn is not over
    lane.end();
    lane.drain();
    REQUIRE(order.size() == 100);
    REQUIRE(lane.sequence() == 101);
    REQUIRE(lane.try_begin() == 102u);
    lane.end();
    lane.enqueue(
        [&](std::uint64_t sequence) { return [&order, sequence] { order.push_back(sequence); }; });
  }
  REQUIRE(order.size() == 101);  // the end of a lane runs what is queued
  for (std::size_t i = 0; i < 100; ++i) REQUIRE(order[i] == i + 2);
}
