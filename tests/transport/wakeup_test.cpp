#include "libddp/transport/wakeup.h"

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "libddp/memory/shared_segment.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/run_ranks.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::expect;

TEST_CASE("futex_wait returns at once when the word differs or no time is given") {
  std::atomic<std::uint32_t> word{1};
  futex_wait(word, 0, 1h);
  futex_wait(word, 1, 0ns);
  futex_wait(word, 1, -5ns);
}

TEST_CASE("futex_wait ends after its limit") {
  std::atomic<std::uint32_t> word{1};
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < 20ms) futex_wait(word, 1, 5ms);
}

TEST_CASE("All sleepers of one process wake") {
  std::atomic<std::uint32_t> word{0};
  libddp::test::run_ranks(4, [&](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(20ms);
      word.store(1);
      futex_wake_all(word);
      return;
    }
    while (word.load() == 0) futex_wait(word, 0, 1h);
  });
}

TEST_CASE("Processes wake each other on shared memory") {
  const SharedSegment segment = SharedSegment::create("libddp-test", 4096);
  auto* words = new (segment.data()) std::atomic<std::uint32_t>[2] {};
  constexpr std::uint32_t kTurns = 1000;
  const auto results = libddp::test::fork_ranks(2, [&](int rank) -> std::string {
    for (std::uint32_t turn = 1; turn <= kTurns; ++turn) {
      words[rank].store(turn);
      futex_wake_all(words[rank]);
      // The limit is far above the test's deadline: a lost wake-up fails the test.
      for (auto seen = words[1 - rank].load(); seen < turn; seen = words[1 - rank].load()) {
        futex_wait(words[1 - rank], seen, 1h);
      }
    }
    return "";
  });
  REQUIRE(results[0].ok());
  REQUIRE(results[1].ok());
  REQUIRE(words[0].load() == kTurns);
}
