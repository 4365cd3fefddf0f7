#include "libddp/host/living_groups.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr const char* kWhere = "libddp[group sub, rank 0/2] create";

}  // namespace

TEST_CASE("a group that is being made ends with what a group beside it lost", "[living]") {
  int store = 0;
  std::exception_ptr loss;
  LivingGroup world;
  world.join(&store, {0, 1, 2, 3}, [&] { return loss; });
  const LossWatch same(&store, {1, 2});
  const LossWatch elsewhere(&world, {1, 2});
  same.throw_if_lost(kWhere);

  SECTION("a rank of its own") {
    loss = std::make_exception_ptr(PeerError("rank 2 died", 2, 4711));
    const std::string text = message_of<PeerError>([&] { same.throw_if_lost(kWhere); });
    REQUIRE(text ==
            std::string(kWhere) + ": a group over the same store failed meanwhile: rank 2 died");
    elsewhere.throw_if_lost(kWhere);
    // It had failed before this one began: whoever goes on knows.
    LossWatch(&store, {1, 2}).throw_if_lost(kWhere);
    world.leave();
    same.throw_if_lost(kWhere);
  }
  SECTION("the network") {
    loss = std::make_exception_ptr(NetworkError("no carrier"));
    REQUIRE_THROWS_AS(same.throw_if_lost(kWhere), NetworkError);
  }
  SECTION("but not a rank that it does not need") {
    loss = std::make_exception_ptr(PeerError("rank 3 died", 3, 4711));
    same.throw_if_lost(kWhere);
  }
}

TEST_CASE("a group that a peer drops does not end one that is being made", "[living]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> has_failed{false};
  run_ranks(2, [&](int rank) {
    const auto make = [&](const char* name) {
      return ProcessGroup::create(
          store,
          {.rank = rank, .world_size = 2, .name = name, .timeout = std::chrono::seconds(60)});
    };
    Group first = make("first");
    first->barrier();
    if (rank == 1) {
      const WorkPtr receive = first->recv(filled(0), 0, 0, {.async = true});
      first.reset();
      message_of<StateError>([&] { receive->wait(); });
      // Rank 0 is in the making of the second group when it learns that the first has failed.
      wait_until([&] { return has_failed.load(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      make("second")->barrier();
      return;
    }
    std::thread onlooker([&] {
      wait_until([&] { return first->failure() != nullptr; });
      has_failed = true;
    });
    make("second")->barrier();
    onlooker.join();
  });
}

TEST_CASE("a rank that aborts and then dies ends a group that is being made", "[living]") {
  const auto results = fork_group(2, [](Group world) -> std::string {
    world->barrier();
    if (world->rank() == 1) {
      world->abort("an exception");
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      ::raise(SIGKILL);
    }
    wait_until([&] { return world->failure() != nullptr; });
    const auto start = std::chrono::steady_clock::now();
    const std::string text = message_of<PeerError>([&] { world->split({0, 1}, "sub"); });
    expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(20), "long before 60 s");
    expect(
        contains(text, "libddp[group sub, rank 0/2] create: a group over the same store failed") &&
            contains(text, "rank 1 (pid ") && contains(text, "died"),
        text);
    return text;
  });
  REQUIRE(results[1].signal == SIGKILL);
  INFO(results[0].text);
  REQUIRE(results[0].ok());
}
