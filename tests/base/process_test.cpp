#include "libddp/base/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "libddp/base/interrupt.h"
#include "libddp/base/random.h"
#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;
using libddp::test::expect;

TEST_CASE("A process knows where it is") {
  REQUIRE_FALSE(host_name().empty());
  REQUIRE(boot_id() == boot_id());
  REQUIRE(network_namespace() == network_namespace());
  if (!network_namespace().empty()) REQUIRE(network_namespace().substr(0, 5) == "net:[");
  if (!pid_namespace().empty()) REQUIRE(pid_namespace().substr(0, 5) == "pid:[");
}

TEST_CASE("A forked child is told from its parent") {
  const ProcessStamp stamp;
  const std::string id = boot_id();
  REQUIRE(stamp.is_current());
  const auto results = libddp::test::fork_ranks(1, [&](int) -> std::string {
    expect(!stamp.is_current(), "made in the parent");
    expect(ProcessStamp().is_current(), "made here");
    expect(boot_id() == id, "the same machine");
    return "";
  });
  INFO(results[0].text);
  REQUIRE(results[0].ok());
  REQUIRE(stamp.is_current());
}

TEST_CASE("UniqueFd closes what it owns, once") {
  const int number = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd first(number);
    UniqueFd second(std::move(first));
    REQUIRE_FALSE(first);
    REQUIRE(second.get() == number);
    first = std::move(second);
    REQUIRE(first.get() == number);
    REQUIRE(::fcntl(number, F_GETFD) >= 0);
  }
  REQUIRE(::fcntl(number, F_GETFD) == -1);
  UniqueFd released(::dup(0));
  const int kept = released.release();
  released.reset();
  REQUIRE(::fcntl(kept, F_GETFD) >= 0);
  ::close(kept);
}

TEST_CASE("Random names differ and are hexadecimal") {
  REQUIRE(random_hex(16).size() == 32);
  REQUIRE(random_hex(16) != random_hex(16));
  REQUIRE(random_hex(0).empty());
  REQUIRE(random_hex(256).find_first_not_of("0123456789abcdef") == std::string::npos);
}

TEST_CASE("The interrupt hook is called, and not more often than asked") {
  static int calls = 0;
  struct Stop {};
  check_interrupt();  // none is set
  REQUIRE(set_interrupt_hook([] { ++calls; }) == nullptr);
  check_interrupt();
  REQUIRE(calls == 1);
  InterruptPoll poll;
  const auto start = std::chrono::steady_clock::now();
  while (calls < 3) poll.poll();
  REQUIRE(std::chrono::steady_clock::now() - start >= 2 * kInterruptPeriod);
  REQUIRE(set_interrupt_hook([] { throw Stop(); }) != nullptr);
  REQUIRE_THROWS_AS(check_interrupt(), Stop);
  set_interrupt_hook(nullptr);
}
