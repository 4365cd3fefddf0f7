#include "libddp/bootstrap/key_value_store.h"

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/folder_store.h"
#include "tests/support/run_ranks.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::message_of;

namespace {

void check_store(KeyValueStore& store) {
  REQUIRE_FALSE(store.try_get("a"));
  REQUIRE_FALSE(store.wait_get("a", Deadline::after(1ms)));
  store.set("a", "one");
  REQUIRE(store.try_get("a") == std::string("one"));
  store.set("a", "two\nlines");
  REQUIRE(store.wait_get("a", Deadline::never()) == std::string("two\nlines"));
  store.set("empty", "");
  REQUIRE(store.try_get_all({"empty", "a"}) == std::vector<std::string>{"", "two\nlines"});
  REQUIRE_FALSE(store.try_get_all({"a", "missing"}));
  REQUIRE(store.try_get("empty") == std::string());
  store.remove("a");
  REQUIRE_FALSE(store.try_get("a"));
  REQUIRE(store.add("n", 5) == 5);
  REQUIRE(store.add("n", -2) == 3);
  REQUIRE(store.try_get("n") == std::string("3"));
}

void check_waiting(KeyValueStore& store) {
  libddp::test::run_ranks(4, [&](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(20ms);
      store.set("late", "value");
    } else {
      expect(store.wait_get("late", Deadline::after(60s)) == "value", "waiters see the value");
    }
    for (int i = 0; i < 100; ++i) store.add("sum", 1);
  });
  REQUIRE(store.try_get("sum") == std::string("400"));
}

}  // namespace

TEST_CASE("InMemoryStore") {
  InMemoryStore store;
  check_store(store);
  check_waiting(store);
}

TEST_CASE("FolderStore of the tests keeps the same promises") {
  libddp::test::FolderStore store;
  check_store(store);
  check_waiting(store);
}

TEST_CASE("A counter on a text is a StoreError") {
  InMemoryStore store;
  store.set("a", "text");
  REQUIRE(contains(message_of<StoreError>([&] { store.add("a", 1); }), "key 'a' holds 'text'"));
}

TEST_CASE("A waiting store lets interrupts through") {
  InMemoryStore store;
  const InterruptHook before =
      set_interrupt_hook([] { throw std::runtime_error("interrupted by the test"); });
  const auto wait = [&] { store.wait_get("never", Deadline::after(60s)); };
  REQUIRE(message_of<std::runtime_error>(wait) == "interrupted by the test");
  set_interrupt_hook(before);
}
