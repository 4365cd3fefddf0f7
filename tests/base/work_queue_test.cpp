#include "libddp/base/work_queue.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("a queue gives numbers in order and runs one at a time", "[queue]") {
  std::vector<std::uint64_t> order;
  {
    WorkQueue queue("test-queue");
    REQUIRE(queue.is_idle());
    REQUIRE(queue.try_begin() == 1u);
    REQUIRE_FALSE(queue.try_begin().has_value());
    for (int i = 0; i < 100; ++i) {
      queue.enqueue([&](std::uint64_t sequence) {
        return [&order, sequence] { order.push_back(sequence); };
      });
    }
    REQUIRE(order.empty());  // the turn is not over
    queue.end();
    queue.drain();
    REQUIRE(order.size() == 100);
    REQUIRE(queue.sequence() == 101);
    REQUIRE(queue.try_begin() == 102u);
    queue.end();
    queue.enqueue(
        [&](std::uint64_t sequence) { return [&order, sequence] { order.push_back(sequence); }; });
  }
  REQUIRE(order.size() == 101);  // the end of a queue runs what is queued
  for (std::size_t i = 0; i < 100; ++i) REQUIRE(order[i] == i + 2);
}
