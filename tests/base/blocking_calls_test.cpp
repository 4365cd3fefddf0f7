// Calls that may never return: given up in time, and harmless when they come back.

#include "libddp/base/blocking_calls.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::message_of;

namespace {

/// A door that a call waits behind.
struct Gate {
  std::atomic<bool> has_come{false};
  std::atomic<bool> is_open{false};
  std::atomic<bool> has_passed{false};

  int pass() {
    has_come = true;
    while (!is_open) std::this_thread::sleep_for(1ms);
    has_passed = true;
    return 7;
  }
};

/// Gives up a call that stands at the gate; one that has not begun when it is given up never does.
void leave_at(BlockingCalls& calls, const std::shared_ptr<Gate>& gate) {
  while (!gate->has_come) {
    REQUIRE_FALSE(calls.run<int>([gate] { return gate->pass(); }, Deadline::after(20ms)));
  }
}

void wait_until_passed(const Gate& gate) {
  for (int i = 0; i < 60'000 && !gate.has_passed; ++i) std::this_thread::sleep_for(1ms);
  REQUIRE(gate.has_passed);
}

}  // namespace

TEST_CASE("A call that returns gives its value, one that throws its error") {
  BlockingCalls calls("test");
  REQUIRE(calls.run<int>([] { return 41; }, Deadline::never()) == 41);
  const std::string text = message_of<StateError>(
      [&] { calls.run<int>([]() -> int { throw StateError("broken"); }, Deadline::never()); });
  REQUIRE(text == "broken");
  REQUIRE_FALSE(calls.hanging_for());
}

TEST_CASE("A call that hangs is given up, and is known to hang until it returns") {
  const auto gate = std::make_shared<Gate>();
  BlockingCalls calls("test");
  leave_at(calls, gate);
  REQUIRE(calls.hanging_for());
  // What waits behind it is given up without having begun.
  const auto count = std::make_shared<std::atomic<int>>(0);
  REQUIRE_FALSE(calls.run<int>([count] { return ++*count; }, Deadline::after(20ms)));
  gate->is_open = true;
  wait_until_passed(*gate);
  REQUIRE(calls.run<int>([] { return 1; }, Deadline::after(60s)) == 1);
  REQUIRE_FALSE(calls.hanging_for());
  REQUIRE(*count == 0);
}

TEST_CASE("Whoever looks around or interrupts ends the wait, not the call") {
  const auto gate = std::make_shared<Gate>();
  BlockingCalls calls("test");
  const auto pass = [gate] { return gate->pass(); };
  SECTION("look") {
    const auto look = [gate] {
      if (gate->has_come) throw StateError("the group failed");
    };
    REQUIRE_THROWS_AS(calls.run<int>(pass, Deadline::after(60s), look), StateError);
  }
  SECTION("an interrupt") {
    static std::atomic<bool> is_pressed;
    is_pressed = false;
    set_interrupt_hook([] {
      if (is_pressed) throw std::runtime_error("Ctrl-C");
    });
    const auto press = [gate] { is_pressed = gate->has_come.load(); };
    CHECK_THROWS_AS(calls.run<int>(pass, Deadline::after(60s), press), std::runtime_error);
    set_interrupt_hook(nullptr);
  }
  REQUIRE(calls.hanging_for());
  gate->is_open = true;
  wait_until_passed(*gate);
}

TEST_CASE("A call that hangs outlives the object, with what it owns") {
  const auto gate = std::make_shared<Gate>();
  {
    BlockingCalls calls("test");
    leave_at(calls, gate);
  }
  REQUIRE(gate.use_count() == 2);
  gate->is_open = true;
  wait_until_passed(*gate);
  for (int i = 0; i < 60'000 && gate.use_count() > 1; ++i) std::this_thread::sleep_for(1ms);
  REQUIRE(gate.use_count() == 1);
}
