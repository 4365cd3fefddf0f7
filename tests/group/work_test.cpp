#include "libddp/group/work.h"

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/log.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("a work ends once, with its error, and calls back", "[work]") {
  Work work("test", {});
  int calls = 0;
  work.on_complete([&](Work& done) {
    ++calls;
    REQUIRE(done.is_completed());
  });
  REQUIRE_FALSE(work.is_completed());
  REQUIRE(work.exception() == nullptr);
  REQUIRE(work.source_rank() == -1);
  work.finish(std::make_exception_ptr(StateError("broken")), 3);
  work.finish();
  REQUIRE(calls == 1);
  REQUIRE(work.source_rank() == 3);
  REQUIRE_THROWS_AS(work.wait(), StateError);
  REQUIRE_THROWS_AS(work.wait(), StateError);
}

TEST_CASE("callbacks and what they hold end before anybody else learns of a work's end", "[work]") {
  const auto work = std::make_shared<Work>("receive", std::vector<at::Tensor>{});
  std::atomic<bool> has_ended{false};
  // A profiler's event, for example, which must not outlive the profiler that the waiter stops.
  std::shared_ptr<void> held(nullptr, [&](void*) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    has_ended = true;
  });
  std::atomic<bool> is_done_inside{false};
  std::atomic<bool> is_first_over{false};
  work->on_complete([&, held = std::move(held)](Work& done) {
    done.wait();
    bool is_called_at_once = false;
    done.on_complete([&](Work&) { is_called_at_once = true; });
    is_done_inside = done.is_completed() && is_called_at_once && done.source_rank() == 3 &&
                     done.finished_ns() > 0 && !has_ended;
  });
  work->on_complete([&](Work&) { is_first_over = has_ended.load(); });
  std::thread finisher([&] { work->finish(nullptr, 3); });
  while (!work->is_completed()) std::this_thread::yield();
  const bool has_ended_first = has_ended;
  work->wait();
  finisher.join();
  REQUIRE(has_ended_first);
  REQUIRE(is_done_inside);
  REQUIRE(is_first_over);
}

TEST_CASE("a work that is made of another ends inside the other's callbacks", "[work]") {
  Work inner("inner", {});
  Work outer("outer", {});
  std::vector<std::string> order;
  inner.on_complete([&](Work& done) {
    order.push_back("inner");
    outer.finish(done.exception(), done.source_rank());
    order.push_back("after");
  });
  outer.on_complete([&](Work& done) {
    order.push_back("outer");
    REQUIRE(done.is_completed());
    REQUIRE(inner.is_completed());
  });
  inner.finish(nullptr, 1);
  REQUIRE(order == std::vector<std::string>{"inner", "outer", "after"});
  REQUIRE(outer.source_rank() == 1);
  REQUIRE(outer.is_completed());
}

TEST_CASE("a callback that throws does not reach the finisher", "[work]") {
  set_log_level(LogLevel::Off);
  Work work("test", {});
  bool is_next_called = false;
  work.on_complete([](Work&) { throw std::runtime_error("mine"); });
  work.on_complete([&](Work&) { is_next_called = true; });
  work.finish();
  set_log_level(LogLevel::Warn);
  REQUIRE(is_next_called);
  work.wait();
}

TEST_CASE("many threads wait for one work", "[work]") {
  auto work = std::make_shared<Work>("test", std::vector<at::Tensor>{});
  run_ranks(4, [&](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      work->finish();
    }
    work->wait();
  });
}
