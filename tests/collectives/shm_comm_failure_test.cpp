// What ends a communicator: each with the class of error and the words that name the culprit.

#include <atomic>
#include <chrono>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/collectives/shm_comm.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {
namespace {

using namespace std::chrono_literals;

CommCall all_reduce_call(std::uint64_t sequence, std::uint64_t count) {
  return CommFixture::call(OpKind::AllReduce, sequence, Dtype::Float32, count);
}

CommCall barrier_call(std::uint64_t sequence) {
  return CommFixture::call(OpKind::Barrier, sequence);
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) expect(contains(message, part), part + " in: " + message);
}

TEST_CASE("two ranks with different calls: both are named on both, and the group is poisoned") {
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    CommFixture fixture(2, mask);
    run_ranks(2, [&](int rank) {
      float data[8] = {};
      ShmComm& comm = fixture.comm(rank);
      CommCall broadcast = CommFixture::call(OpKind::Broadcast, 42, Dtype::Float32, 8);
      broadcast.description.root = 0;
      const auto message = message_of<PeerError>([&] {
        if (rank == 0) comm.all_reduce(all_reduce_call(42, 8), data);
        if (rank == 1) comm.broadcast(broadcast, data, sizeof(data), 0);
      });
      expect_parts(message, {"libddp[group test, rank " + std::to_string(rank) + "/2]",
                             "rank 0 called all_reduce #42 float32 [8] SUM",
                             "rank 1 called broadcast #42 float32 [8] root 0", "Hint: "});
      const auto later = message_of<PeerError>([&] { comm.barrier(barrier_call(43)); });
      expect_parts(later, {"barrier #43: the group has failed before: ",
                           "rank 1 called broadcast #42 float32 [8] root 0"});
      expect(comm.failure()->peer_rank == -1, "nobody is to blame");
    });
  }
}

TEST_CASE("of three ranks with different calls none is to blame, and who called what is told") {
  CommFixture fixture(3);
  run_ranks(3, [&](int rank) {
    std::vector<float> data(3000);
    const std::uint64_t count = rank == 1 ? 2000 : 3000;
    // Rank 1 comes last, so that every rank sees all three calls.
    const auto is_there = [&](int peer) {
      return contains(fixture.comm(1).last_call_of(peer), "all_reduce");
    };
    while (rank == 1 && !(is_there(0) && is_there(2))) std::this_thread::sleep_for(1ms);
    const auto message = message_of<PeerError>(
        [&] { fixture.comm(rank).all_reduce(all_reduce_call(7, count), data.data()); });
    expect_parts(message, {"ranks 0, 2 called all_reduce #7 float32 [3000]",
                           "rank 1 called all_reduce #7 float32 [2000]"});
    expect(fixture.comm(rank).failure()->peer_rank == -1, "nobody is to blame");
  });
}

TEST_CASE("a mismatch is told although another rank never comes") {
  CommFixture fixture(3);
  run_ranks(2, [&](int rank) {
    float data = 0;
    const auto message = message_of<PeerError>(
        [&] { fixture.comm(rank).all_reduce(all_reduce_call(rank == 0 ? 5 : 6, 1), &data); });
    expect_parts(message, {"rank 0 called all_reduce #5", "rank 1 called all_reduce #6"});
  });
}

TEST_CASE("a timeout names the ranks that did not come, and what they called last") {
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    CommFixture fixture(3, mask);
    run_ranks(3, [&](int rank) {
      ShmComm& comm = fixture.comm(rank);
      comm.barrier(barrier_call(1));
      if (rank == 1) return;
      CommCall call = all_reduce_call(2, 25600);
      call.description.num_dims = 2;
      call.description.shape[0] = 25;
      call.description.shape[1] = 1024;
      call.timeout = 300ms;
      std::vector<float> data(25600);
      if (rank == 0) {
        const auto message = message_of<TimeoutError>([&] { comm.all_reduce(call, data.data()); });
        expect_parts(message, {"libddp[group test, rank 0/3] all_reduce #2 float32 [25, 1024] SUM: "
                               "timed out after ",
                               "waiting for rank 1 (pid 1001, last call: barrier #1)", "Hint: "});
        const auto later = message_of<TimeoutError>([&] { comm.throw_if_failed(); });
        expect(later == message, "the cause is kept");
      } else {
        // Whoever looks second may learn it from the first.
        call.timeout = 20s;
        const auto message = message_of<PeerError>([&] { comm.all_reduce(call, data.data()); });
        expect_parts(message, {"rank 0 (pid 1000) gave up: ", "waiting for rank 1"});
      }
    });
  }
}

TEST_CASE("a deadline counts as well as a timeout, and rank that never called is told so") {
  CommFixture fixture(2);
  CommCall call = barrier_call(9);
  call.timeout = std::nullopt;
  call.deadline = Deadline::after(50ms);
  const auto message = message_of<TimeoutError>([&] { fixture.comm(0).barrier(call); });
  REQUIRE(contains(message, "waiting for rank 1 (pid 1001, last call: nothing yet)"));
}

TEST_CASE("fail from another thread ends a wait at once, here and on the peers") {
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    CommFixture fixture(3, mask);
    std::thread aborter([&] {
      std::this_thread::sleep_for(100ms);
      fixture.comm(2).fail({.kind = GroupFailure::Kind::Aborted, .message = "data loader broke"});
    });
    const auto start = std::chrono::steady_clock::now();
    run_ranks(2, [&](int rank) {
      const auto message =
          message_of<PeerError>([&] { fixture.comm(rank).barrier(barrier_call(3)); });
      expect_parts(message, {"barrier #3: rank 2 (pid 1002) aborted: data loader broke"});
    });
    aborter.join();
    REQUIRE(std::chrono::steady_clock::now() - start < 20s);
    const auto own = message_of<StateError>([&] { fixture.comm(2).barrier(barrier_call(3)); });
    REQUIRE(contains(own, "the group has failed before: data loader broke"));
  }
}

TEST_CASE("the rank to blame stays the same, whoever passes the failure on") {
  CommFixture fixture(3);
  fixture.comm(2).fail({GroupFailure::Kind::Peer, "rank 1 (pid 1001) met an error", 1, 1001});
  // Rank 1 learns of it before rank 0 does, which looks at rank 1 first.
  for (const int rank : {1, 0}) {
    message_of<PeerError>([&] { fixture.comm(rank).barrier(barrier_call(1)); });
    CHECK(fixture.comm(rank).failure()->peer_rank == 1);
    CHECK(fixture.comm(rank).failure()->peer_pid == 1001);
  }
}

TEST_CASE("the own rank's waiter wakes too, and the first failure is kept") {
  CommFixture fixture(2);
  std::thread watchdog([&] {
    std::this_thread::sleep_for(100ms);
    fixture.comm(0).fail({GroupFailure::Kind::Peer, "rank 1 (pid 1001) died", 1, 1001});
    fixture.comm(0).fail({GroupFailure::Kind::Aborted, "second"});
  });
  try {
    fixture.comm(0).barrier(barrier_call(1));
    FAIL("the barrier ended");
  } catch (const PeerError& error) {
    REQUIRE(contains(error.what(), "barrier #1: rank 1 (pid 1001) died"));
    REQUIRE(error.peer_rank() == 1);
    REQUIRE(error.peer_pid() == 1001);
  }
  watchdog.join();
  REQUIRE(fixture.comm(0).failure()->message == "rank 1 (pid 1001) died");
}

TEST_CASE("a message that is already complete is thrown as it is") {
  CommFixture fixture(1);
  fixture.comm(0).fail({GroupFailure::Kind::Timeout, "libddp[group test, rank 0/1] x: y", -1, 0});
  REQUIRE(message_of<TimeoutError>([&] { fixture.comm(0).throw_if_failed(); }) ==
          "libddp[group test, rank 0/1] x: y");
}

struct Interrupted {};

TEST_CASE("an interrupt leaves the wait as it is and poisons the group") {
  CommFixture fixture(2);
  const InterruptHook before = set_interrupt_hook([] { throw Interrupted(); });
  REQUIRE_THROWS_AS(fixture.comm(0).barrier(barrier_call(1)), Interrupted);
  set_interrupt_hook(before);
  // Rank 0 had posted the barrier before it was interrupted, but has not passed it.
  const auto message = message_of<PeerError>([&] { fixture.comm(1).barrier(barrier_call(1)); });
  REQUIRE(contains(message, "rank 0 (pid 1000) aborted: barrier #1: interrupted while waiting"));
}

TEST_CASE("last_call_of tells what a rank posted") {
  CommFixture fixture(2);
  REQUIRE(fixture.comm(0).last_call_of(1) == "nothing yet");
  run_ranks(2, [&](int rank) {
    float data = 1;
    fixture.comm(rank).all_reduce(all_reduce_call(12, 1), &data);
  });
  REQUIRE(fixture.comm(0).last_call_of(1) == "all_reduce #12 float32 [1] SUM");
}

}  // namespace
}  // namespace libddp::test
