#include "libddp/watchdog/pending_troubles.h"

#include <cstdint>

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("a trouble counts once somebody has waited for it", "[liveness]") {
  constexpr std::int64_t kGrace = PendingTroubles::kGraceNs;
  PendingTroubles troubles;
  troubles.add(2, {41, 1, "oops", 100});
  REQUIRE_FALSE(troubles.due(0, 100 + kGrace));   // nothing runs here
  REQUIRE_FALSE(troubles.due(41, 100 + kGrace));  // that one it took part in
  REQUIRE_FALSE(troubles.due(42, 99 + kGrace));
  REQUIRE(troubles.due(42, 100 + kGrace)->rank == 2);
  SECTION("and is taken back") {
    troubles.remove(2);
    REQUIRE(troubles.empty());
    REQUIRE_FALSE(troubles.due(42, 100 + kGrace));
  }
  SECTION("unless this rank has had the same") {
    REQUIRE(troubles.add_own(41) == 1);
    REQUIRE_FALSE(troubles.due(42, 100 + kGrace));
    troubles.add(2, {41, 2, "again", 100});
    REQUIRE(troubles.due(42, 100 + kGrace)->what == "again");
    REQUIRE(troubles.add_own(41) == 2);
    REQUIRE_FALSE(troubles.due(42, 100 + kGrace));
    REQUIRE(troubles.add_own(43) == 1);
  }
}
