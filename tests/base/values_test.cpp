// The small value types: Deadline, Backoff, Dtype, errors, checks.

#include <cerrno>
#include <chrono>
#include <string>

#include "libddp/base/backoff.h"
#include "libddp/base/check.h"
#include "libddp/base/deadline.h"
#include "libddp/base/dtype.h"
#include "libddp/base/error.h"
#include "libddp/base/group_failure.h"
#include "libddp/base/system_error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::message_of;

TEST_CASE("A Deadline expires and tells what is left") {
  const Deadline past = Deadline::after(0ms);
  REQUIRE(past.expired());
  REQUIRE(past.remaining(1h) == 0ns);
  REQUIRE(Deadline::after(-5ms).remaining(1h) == 0ns);
  REQUIRE(Deadline::after(std::chrono::milliseconds::min()).expired());
  const Deadline future = Deadline::after(1h);
  REQUIRE_FALSE(future.expired());
  REQUIRE_FALSE(future.is_never());
  REQUIRE(future.remaining(100ms) == 100ms);
  REQUIRE(future.remaining(2h) <= 1h);
  REQUIRE(future.remaining(2h) > 30min);
}

TEST_CASE("A Backoff grows by half up to its limit and heeds the deadline") {
  Backoff backoff(1ms);
  REQUIRE(backoff.next() == 500us);
  const auto start = std::chrono::steady_clock::now();
  backoff.pause();
  REQUIRE(std::chrono::steady_clock::now() - start >= 500us);
  REQUIRE(backoff.next() == 750us);
  for (int i = 0; i < 3; ++i) backoff.pause(Deadline::after(0ms));
  REQUIRE(backoff.next() == 1ms);
}

TEST_CASE("A Deadline may be never, and huge timeouts are") {
  REQUIRE(Deadline::never().is_never());
  REQUIRE_FALSE(Deadline::never().expired());
  REQUIRE(Deadline::never().remaining(7s) == 7s);
  REQUIRE(Deadline::after(std::chrono::milliseconds::max()).is_never());
}

TEST_CASE("Dtypes have torch's names and sizes") {
  struct Row {
    Dtype dtype;
    const char* name;
    std::size_t bytes;
  };
  for (const Row& row : {Row{Dtype::Float32, "float32", 4}, Row{Dtype::Float64, "float64", 8},
                         Row{Dtype::BFloat16, "bfloat16", 2}, Row{Dtype::Float16, "float16", 2},
                         Row{Dtype::Int8, "int8", 1}, Row{Dtype::UInt8, "uint8", 1},
                         Row{Dtype::Int16, "int16", 2}, Row{Dtype::Int32, "int32", 4},
                         Row{Dtype::Int64, "int64", 8}, Row{Dtype::Bool, "bool", 1}}) {
    REQUIRE(name(row.dtype) == row.name);
    REQUIRE(element_bytes(row.dtype) == row.bytes);
  }
  REQUIRE_THROWS_AS(element_bytes(static_cast<Dtype>(200)), Error);
  REQUIRE_THROWS_AS(name(static_cast<Dtype>(200)), Error);
}

TEST_CASE("A failed check names condition, place and detail") {
  int evaluated = 0;
  const auto detail = [&] {
    ++evaluated;
    return std::string("the detail");
  };
  LIBDDP_CHECK(1 + 1 == 2, detail());
  REQUIRE(evaluated == 0);
  const std::string message = message_of<Error>([&] { LIBDDP_CHECK(1 + 1 == 3, detail()); });
  REQUIRE(contains(message, "libddp: internal error: '1 + 1 == 3' does not hold ("));
  REQUIRE(contains(message, "values_test.cpp:"));
  REQUIRE(contains(message, "the detail"));
  REQUIRE(evaluated == 1);
}

TEST_CASE("errno becomes text") {
  REQUIRE(errno_text("open", ENOENT) == "open: No such file or directory (errno 2)");
}

TEST_CASE("PeerError keeps the culprit") {
  const PeerError error("gone", 5, 4711);
  REQUIRE(error.peer_rank() == 5);
  REQUIRE(error.peer_pid() == 4711);
  REQUIRE(PeerError("gone", 1).peer_pid() == 0);
  REQUIRE_THROWS_AS(throw PeerError("gone", 1), Error);
}

TEST_CASE("A failure is told on with its culprit; what a rank did itself is its own") {
  using Kind = GroupFailure::Kind;
  const auto told = [](const GroupFailure& failure) {
    return told_by("rank 2 (pid 7)", 2, 7, failure);
  };
  const GroupFailure peer = told({Kind::Peer, "rank 1 (pid 5) died", 1, 5});
  CHECK(peer.message == "rank 1 (pid 5) died");
  CHECK((peer.peer_rank == 1 && peer.peer_pid == 5));
  CHECK(told({Kind::Peer, "the ranks called different collectives", -1, 0}).peer_rank == -1);
  CHECK(told({Kind::Network, "the network broke", 1, 5}).kind == Kind::Network);

  const GroupFailure abort = told({Kind::Aborted, "a reason", -1, 0});
  CHECK(abort.message == "rank 2 (pid 7) aborted: a reason");
  CHECK((abort.kind == Kind::Peer && abort.peer_rank == 2 && abort.peer_pid == 7));
  const GroupFailure timeout = told({Kind::Timeout, "timed out waiting for rank 1", 1, 5});
  CHECK(timeout.message == "rank 2 (pid 7) gave up: timed out waiting for rank 1");
  CHECK((timeout.kind == Kind::Peer && timeout.peer_rank == 1 && timeout.peer_pid == 5));
}
