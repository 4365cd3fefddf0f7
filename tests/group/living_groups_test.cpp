#include "libddp/group/living_groups.h"

#include <exception>
#include <string>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr const char* kWhere = "libddp[group sub, rank 0/2] create";

}  // namespace

TEST_CASE("a group that is being made ends with what a group beside it lost", "[living]") {
  int store = 0;
  std::exception_ptr failure;
  LivingGroup world;
  world.join(&store, {0, 1, 2, 3}, [&] {
    if (failure) std::rethrow_exception(failure);
  });
  const FailureWatch same(&store, {1, 2});
  const FailureWatch elsewhere(&world, {1, 2});
  same.throw_if_failed(kWhere);

  SECTION("a rank of its own") {
    failure = std::make_exception_ptr(PeerError("rank 2 died", 2, 4711));
    const std::string text = message_of<PeerError>([&] { same.throw_if_failed(kWhere); });
    REQUIRE(text ==
            std::string(kWhere) + ": a group over the same store failed meanwhile: rank 2 died");
    elsewhere.throw_if_failed(kWhere);
    // It had failed before this one began: whoever goes on knows.
    FailureWatch(&store, {1, 2}).throw_if_failed(kWhere);
    world.leave();
    same.throw_if_failed(kWhere);
  }
  SECTION("the network") {
    failure = std::make_exception_ptr(NetworkError("no carrier"));
    REQUIRE_THROWS_AS(same.throw_if_failed(kWhere), NetworkError);
  }
  SECTION("but not with a rank that it does not need, nor with an abort") {
    failure = std::make_exception_ptr(PeerError("rank 3 died", 3, 4711));
    same.throw_if_failed(kWhere);
    failure = std::make_exception_ptr(StateError("aborted"));
    same.throw_if_failed(kWhere);
    failure = std::make_exception_ptr(TimeoutError("late"));
    same.throw_if_failed(kWhere);
  }
}
