#include "libddp/collectives/wait_policy.h"

#include <sched.h>

#include <fstream>

#include "libddp/collectives/shm_page.h"
#include "tests/support/catch.h"

namespace libddp {
namespace {

TEST_CASE("the union of masks counts") {
  REQUIRE(count_cpus({"3", "3"}) == 2);
  REQUIRE(count_cpus({"1", "2", "4"}) == 3);
  REQUIRE(count_cpus({"f0000000000000000"}) == 4);
  REQUIRE(count_cpus({"ff", ""}) == 8);
}

TEST_CASE("what is no mask counts as one CPU") {
  REQUIRE(count_cpus({}) == 1);
  REQUIRE(count_cpus({"", "xyz"}) == 1);
}

TEST_CASE("a container's quota, rounded up") {
  REQUIRE(cpu_quota("200000 100000") == 2);
  REQUIRE(cpu_quota("150000 100000") == 2);
  REQUIRE(cpu_quota("1000 100000") == 1);
  REQUIRE_FALSE(cpu_quota("max 100000"));
  REQUIRE_FALSE(cpu_quota(""));
  REQUIRE_FALSE(cpu_quota("5 0"));
}

TEST_CASE("more ranks than CPUs is oversubscribed") {
  REQUIRE_FALSE(WaitPolicy::choose({"3", "3"}).oversubscribed);
  REQUIRE(WaitPolicy::choose({"3", "3", "3"}).oversubscribed);
  REQUIRE(WaitPolicy::choose({"1", "1"}).oversubscribed);
  REQUIRE_FALSE(WaitPolicy::choose({"1", "2"}).oversubscribed);
}

TEST_CASE("limits fit the page for every number of ranks") {
  for (std::size_t ranks = 1; ranks <= kMaxRanks; ++ranks) {
    for (const char* mask : {"1", "ffffffffffffffffffffffffffffffff"}) {
      const WaitPolicy policy = WaitPolicy::choose(std::vector<std::string>(ranks, mask));
      REQUIRE(policy.inline_bytes <= policy.ordinary_inline_bytes);
      REQUIRE(policy.ordinary_inline_bytes <= ShmPage::kInlineBytes);
      REQUIRE(policy.chunk_bytes <= ShmPage::kStagingBytes);
      REQUIRE(policy.chunk_bytes / ranks >= 64);
    }
  }
}

TEST_CASE("the own mask is what the kernel says") {
  cpu_set_t set;
  CPU_ZERO(&set);
  REQUIRE(sched_getaffinity(0, sizeof(set), &set) == 0);
  // A quota can only take away.
  REQUIRE(count_cpus({own_cpu_mask_text()}) <= CPU_COUNT(&set));
  if (!std::ifstream("/sys/fs/cgroup/cpu.max")) {
    REQUIRE(count_cpus({own_cpu_mask_text()}) == CPU_COUNT(&set));
  }
}

}  // namespace
}  // namespace libddp
