// Groups over Gloo: its errors, aborts, and the end of a group with operations in flight.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "libddp/interop/c10d_failure.h"
#include "libddp/interop/foreign_clock.h"
#include "tests/interop/gloo_ranks.h"
#include "tests/interop/stub_backend.h"
#include "tests/support/catch.h"
#include "tests/support/require_parts.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

namespace {

/// Rank 0's error when rank 1 ends without taking part.
template <class Expected>
std::string error_of_rank_0(const std::function<void(ProcessGroup&)>& on_rank_0,
                            const std::function<void(Group&)>& on_rank_1) {
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  std::string message;
  run_ranks(2, [&](int rank) {
    Group group = from_c10d(local_gloo(store, rank, 2, 60s), {.name = "wrapped"});
    at::Tensor tensor = at::full({4}, 1.0);
    group->all_reduce(tensor);
    if (rank == 1) return on_rank_1(group);
    message = message_of<Expected>([&] { on_rank_0(*group); });
    const std::string later = message_of<Expected>([&] { group->barrier(); });
    expect(later == message, "the first failure again: " + later);
    expect(group->failure() != nullptr, "failure()");
  });
  return message;
}

}  // namespace

TEST_CASE("a rank that ends is a PeerError with Gloo's words", "[from_c10d]") {
  const std::string message = error_of_rank_0<PeerError>(
      [](ProcessGroup& group) {
        at::Tensor tensor = at::full({1000}, 1.0);
        group.all_reduce(tensor);
      },
      [](Group& group) { group.reset(); });
  require_parts(message,
                {"libddp[group wrapped, rank 0/2] all_reduce #2 float32 [1000] SUM: gloo: ",
                 "by peer", "Hint: "});
}

TEST_CASE("a rank that does not come is a TimeoutError with Gloo's words", "[from_c10d]") {
  std::atomic<bool> is_over{false};
  const std::string message = error_of_rank_0<TimeoutError>(
      [&](ProcessGroup& group) {
        at::Tensor tensor = at::full({1000}, 1.0);
        const auto finish = [&] { is_over = true; };
        try {
          group.all_reduce(tensor, {}, {.timeout = 300ms});
        } catch (...) {
          finish();
          throw;
        }
      },
      [&](Group&) {
        while (!is_over) std::this_thread::sleep_for(5ms);
      });
  require_parts(message, {"all_reduce #2", "imed out", "raise the timeout"});
}

TEST_CASE("a message that does not come is a TimeoutError", "[from_c10d]") {
  std::atomic<bool> is_over{false};
  const std::string message = error_of_rank_0<TimeoutError>(
      [&](ProcessGroup& group) {
        at::Tensor tensor = at::zeros({4});
        try {
          group.recv(tensor, 1, 0, {.timeout = 300ms});
        } catch (...) {
          is_over = true;
          throw;
        }
      },
      [&](Group&) {
        while (!is_over) std::this_thread::sleep_for(5ms);
      });
  require_parts(message, {"recv #1", "imed out"});
}

TEST_CASE("what a backend without deadlines does not end is given up", "[from_c10d]") {
  const auto stuck = c10::make_intrusive<StuckBackend>(0, 2);
  const auto started = std::chrono::steady_clock::now();
  const bool is_message = GENERATE(false, true);
  Group group = from_c10d(c10::intrusive_ptr<c10d::Backend>(stuck), {.name = "wrapped"});
  at::Tensor tensor = at::full({1000}, 1.0);
  const WorkPtr other = group->all_reduce(tensor, {}, {.async = true, .timeout = 600s});
  const std::string message = message_of<TimeoutError>([&] {
    if (is_message) {
      group->recv(tensor, 1, 0, {.timeout = 200ms});
    } else {
      group->all_reduce(tensor, {}, {.timeout = 200ms});
    }
  });
  require_parts(message,
                {"libddp[group wrapped, rank 0/2] ",
                 is_message ? "recv #1 " : "all_reduce #2 float32 [1000] SUM",
                 "timed out after 0.2 s, by libddp's clock: stuck has not ended it. Hint: "});
  // The group has failed: what was in flight ends too, and nothing begins.
  require_parts(message_of<TimeoutError>([&] { other->wait(); }), {message});
  require_parts(message_of<TimeoutError>([&] { group->barrier(); }), {message});
  group->shutdown();
  group.reset();
  REQUIRE(std::chrono::steady_clock::now() - started < 60s);
  stuck->release();
}

TEST_CASE("a collective's time counts from the end of the one before, a message's does not",
          "[from_c10d]") {
  ForeignClock clock;
  std::atomic<bool> second_is_late{false};
  std::atomic<bool> message_is_late{false};
  const auto never = [] { std::abort(); };
  const auto first = clock.start(1s, ForeignClock::Kind::Collective, never);
  const auto second =
      clock.start(1s, ForeignClock::Kind::Collective, [&] { second_is_late = true; });
  clock.start(1s, ForeignClock::Kind::Message, [&] { message_is_late = true; });
  std::this_thread::sleep_for(900ms);
  clock.end(first);
  while (!message_is_late) std::this_thread::sleep_for(1ms);
  REQUIRE_FALSE(second_is_late);
  while (!second_is_late) std::this_thread::sleep_for(1ms);
  clock.end(second);  // of one that was late: nothing
}

TEST_CASE("abort ends what is in flight over Gloo at once", "[from_c10d]") {
  std::atomic<bool> is_over{false};
  const std::string message = error_of_rank_0<StateError>(
      [&](ProcessGroup& group) {
        at::Tensor tensor = at::full({4}, 1.0);
        const WorkPtr work = group.all_reduce(tensor, {}, {.async = true});
        group.abort("enough");
        is_over = true;
        work->wait();
      },
      [&](Group& group) {
        while (!is_over) std::this_thread::sleep_for(5ms);
        at::Tensor tensor = at::full({4}, 1.0);
        group->all_reduce(tensor);  // Gloo itself goes on
      });
  require_parts(message, {"the group was aborted: enough", "make a new group"});
}

TEST_CASE("refused arguments leave a group over Gloo usable", "[from_c10d]") {
  run_over_gloo(2, [](ProcessGroup& group, int) {
    at::Tensor tensor = at::full({4}, 1.0);
    message_of<ArgumentError>([&] { group.all_reduce(tensor, {.op = ReduceOp::Band}); });
    message_of<ArgumentError>([&] { group.broadcast(tensor, 2); });
    group.all_reduce(tensor);
    expect(tensor[0].item<double>() == 2, "afterwards");
  });
}

TEST_CASE("a callback of an operation over Gloo may end the group", "[from_c10d]") {
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](int rank) {
    Group group = from_c10d(local_gloo(store, rank, 2, 60s));
    at::Tensor tensor = at::full({4}, 1.0);
    std::atomic<bool> is_gone{false};
    {
      const WorkPtr work = group->all_reduce(tensor, {}, {.async = true});
      work->on_complete([&, held = std::move(group)](Work&) mutable {
        held.reset();
        is_gone = true;
      });
    }
    while (!is_gone) std::this_thread::sleep_for(1ms);
  });
}

TEST_CASE("torch's exceptions and their words decide the class", "[from_c10d]") {
  const auto made = [](auto error) {
    return error_of_c10d(std::make_exception_ptr(error), "here", "gloo");
  };
  REQUIRE_THROWS_AS(std::rethrow_exception(made(std::runtime_error("Timed out waiting 5ms"))),
                    TimeoutError);
  REQUIRE_THROWS_AS(std::rethrow_exception(made(std::runtime_error("Connection reset by peer"))),
                    PeerError);
  REQUIRE_THROWS_AS(std::rethrow_exception(made(std::runtime_error("connect: refused"))),
                    NetworkError);
  REQUIRE_THROWS_AS(std::rethrow_exception(made(std::runtime_error("op.nbytes <= nbytes"))),
                    PeerError);
  REQUIRE_THROWS_AS(
      std::rethrow_exception(made(c10::DistStoreError({"f", "file", 1}, "key is not set"))),
      StoreError);
  REQUIRE_THROWS_AS(std::rethrow_exception(made(c10::Error({"f", "file", 1}, "Bad op"))),
                    ArgumentError);
  REQUIRE_THROWS_AS(std::rethrow_exception(made(StateError("ours"))), StateError);
  REQUIRE(made(StateError("x")) != nullptr);
  REQUIRE(error_of_c10d(nullptr, "here", "gloo") == nullptr);
}
