#include "libddp/collectives/wait_ledger.h"

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("a wait is shared out between who came last and whom that one waited for") {
  WaitLedger ledger(4);
  ledger.add(2, 50, {.rank = 3, .ns = 40});
  REQUIRE(ledger.total_ns(2) == 10);
  REQUIRE(ledger.total_ns(3) == 40);
  REQUIRE(ledger.longest().rank == 3);
  // Nobody waits longer for another one than at all.
  ledger.add(2, 5, {.rank = 3, .ns = 1000});
  REQUIRE(ledger.total_ns(2) == 10);
  REQUIRE(ledger.total_ns(3) == 45);
  ledger.forget();
  REQUIRE(ledger.longest().ns == 0);
  ledger.add(1, 7);
  REQUIRE(ledger.longest().rank == 1);
}

TEST_CASE("what another host says of delays may be nonsense") {
  WaitLedger ledger(2);
  ledger.add(1, 10, {.rank = 1 << 30, .ns = 4});
  ledger.add(1, 10, {.rank = -7, .ns = 4});
  ledger.add(1, 10, {.rank = 0, .ns = -4});
  ledger.add(1, -10, {.rank = 0, .ns = 4});
  ledger.add(-1, 10);
  ledger.add(2, 10);
  REQUIRE(ledger.total_ns(0) == 0);
  REQUIRE(ledger.total_ns(1) == 26);
}
