#include "libddp/watchdog/reported_errors.h"

#include <cstdint>

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("an error counts once somebody has waited for it", "[liveness]") {
  constexpr std::int64_t kGrace = ReportedErrors::kGraceNs;
  ReportedErrors reports;
  reports.add(2, {41, 1, "oops", 100});
  REQUIRE_FALSE(reports.due(0, 100 + kGrace));   // nothing runs here
  REQUIRE_FALSE(reports.due(41, 100 + kGrace));  // that one it took part in
  REQUIRE_FALSE(reports.due(42, 99 + kGrace));
  REQUIRE(reports.due(42, 100 + kGrace)->rank == 2);
  SECTION("and is taken back") {
    reports.remove(2);
    REQUIRE(reports.empty());
    REQUIRE_FALSE(reports.due(42, 100 + kGrace));
  }
  SECTION("unless this rank has had the same") {
    REQUIRE(reports.add_own(41) == 1);
    REQUIRE_FALSE(reports.due(42, 100 + kGrace));
    reports.add(2, {41, 2, "again", 100});
    REQUIRE(reports.due(42, 100 + kGrace)->what == "again");
    REQUIRE(reports.add_own(41) == 2);
    REQUIRE_FALSE(reports.due(42, 100 + kGrace));
    REQUIRE(reports.add_own(43) == 1);
  }
}
