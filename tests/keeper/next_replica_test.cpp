// How far the copy of a save is, and the copy that comes after it.

#include <chrono>
#include <vector>

#include "libddp/base/error.h"
#include "tests/keeper/two_hosts.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

TEST_CASE("a keeper says how far a save is", "[replica]") {
  TwoHosts hosts(400'000, {.run = "", .bytes_per_second = 500'000, .patience = kPatience});
  const auto pulled = [&](std::uint64_t sequence, const std::vector<int>& ranks = {1}) {
    return hosts.here->pulled(ranks, 3, sequence);
  };
  hosts.remote.save(5, 0);
  REQUIRE(pulled(5) == Pulled::Failed);
  REQUIRE(pulled(5, {}) == Pulled::Here);
  hosts.here->pull(hosts.address, 1, 3, 5);
  REQUIRE(pulled(5) == Pulled::Coming);
  REQUIRE(pulled(4) == Pulled::Failed);
  REQUIRE(pulled(5, {1, 0}) == Pulled::Failed);
  hosts.here->wait_pull(1, 3, 5, soon());
  REQUIRE(pulled(5) == Pulled::Here);
  REQUIRE(hosts.here->pulled({1}, 4, 5) == Pulled::Failed);
  REQUIRE(contains(hosts.failed_pull(7), "is not there"));
  REQUIRE(pulled(7) == Pulled::Failed);
}

TEST_CASE("the copy that is next waits for its turn", "[replica]") {
  TwoHosts hosts(
      400'000,
      {.run = "", .bytes_per_second = 1'000'000, .patience = kPatience, .next_pause = 20s});
  const auto pull_next = [&](std::uint64_t sequence) {
    hosts.here->pull(hosts.address, 1, 3, sequence, PullPurpose::NextReplica);
  };
  hosts.remote.save(5, 0);
  hosts.remote.save(6, 1);
  hosts.remote.save(7, 2);
  hosts.here->pull(hosts.address, 1, 3, 5);
  pull_next(6);
  REQUIRE(hosts.here->pulled({1}, 3, 5) == Pulled::Coming);
  REQUIRE(hosts.here->pulled({1}, 3, 6) == Pulled::Coming);
  // A newer one takes its place, not that of the one on its way.
  pull_next(7);
  REQUIRE(hosts.here->pulled({1}, 3, 6) == Pulled::Failed);
  hosts.here->wait_pull(1, 3, 5, soon());
  REQUIRE(hosts.replicas() == Sequences{5});
  REQUIRE(hosts.here->pulled({1}, 3, 7) == Pulled::Coming);
  // Its turn has come; asked for twice it is fetched once.
  hosts.here->pull(hosts.address, 1, 3, 7);
  wait_until([&] { return hosts.remote.memory.slot(2).is_held(); });
  hosts.here->pull(hosts.address, 1, 3, 7);
  pull_next(7);
  REQUIRE(contains(hosts.here->status(), R"("num_waiting":1)"));
  hosts.here->wait_pull(1, 3, 7, soon());
  REQUIRE(hosts.replicas() == Sequences{5, 7});
}

TEST_CASE("the copy that is next comes by itself when nobody asks for another", "[replica]") {
  TwoHosts hosts(5000, {.run = "", .patience = kPatience, .next_pause = 300ms});
  hosts.remote.save(5, 0);
  const auto begin = std::chrono::steady_clock::now();
  hosts.here->pull(hosts.address, 1, 3, 5, PullPurpose::NextReplica);
  hosts.here->wait_pull(1, 3, 5, soon());
  REQUIRE(std::chrono::steady_clock::now() - begin >= 300ms);
  REQUIRE(hosts.replicas() == Sequences{5});
  // Others do not wait for it.
  hosts.remote.save(6, 1);
  hosts.remote.save(7, 0);
  hosts.here->pull(hosts.address, 1, 3, 6, PullPurpose::NextReplica);
  hosts.here->pull(hosts.address, 0, 3, 7);
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(0, 3, 7, soon()); }),
                   "is not there"));
  REQUIRE(hosts.replicas() == Sequences{5});
  hosts.here->wait_pull(1, 3, 6, soon());
  REQUIRE(hosts.replicas() == Sequences{5, 6});
}
