#include "libddp/memory/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "libddp/memory/shared_segment.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;

namespace {

constexpr std::size_t kBytes = 16u << 20;

std::size_t resident_pages(const SharedSegment& segment) {
  std::vector<unsigned char> flags(segment.size_bytes() / 4096);
  REQUIRE(::mincore(segment.data(), segment.size_bytes(), flags.data()) == 0);
  std::size_t count = 0;
  for (unsigned char flag : flags) count += flag & 1;
  return count;
}

bool wait_until_done(const PrefaultJob& job) {
  for (int i = 0; i < 6000 && !job.done(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return job.done();
}

}  // namespace

TEST_CASE("Prefault makes all pages resident and keeps their contents") {
  SharedSegment segment = SharedSegment::create("libddp-test", kBytes);
  segment.data()[0] = std::byte{3};
  segment.data()[kBytes - 1] = std::byte{4};
  const auto job = prefault(segment.data(), kBytes);
  REQUIRE(wait_until_done(*job));
  REQUIRE(resident_pages(segment) == kBytes / 4096);
  REQUIRE(segment.data()[0] == std::byte{3});
  REQUIRE(segment.data()[kBytes - 1] == std::byte{4});
}

TEST_CASE("A cancelled prefault touches nothing more") {
  // Many jobs, so that some are cancelled before, some in the middle of their work. Unmapping the
  // memory right after cancel() makes any later touch a crash.
  for (int i = 0; i < 30; ++i) {
    SharedSegment segment = SharedSegment::create("libddp-test", kBytes);
    const auto job = prefault(segment.data(), kBytes);
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200 * i));
    job->cancel();
    job->cancel();
  }
}

TEST_CASE("A job that is cancelled before it runs faults in nothing") {
  SharedSegment segment = SharedSegment::create("libddp-test", kBytes);
  PrefaultJob job(segment.data(), kBytes);
  job.cancel();
  REQUIRE_FALSE(job.run_piece());
  REQUIRE_FALSE(job.done());
  REQUIRE(resident_pages(segment) == 0);
}

TEST_CASE("A job works in pieces") {
  SharedSegment segment = SharedSegment::create("libddp-test", kBytes);
  PrefaultJob job(segment.data(), kBytes);
  REQUIRE(job.run_piece());
  const std::size_t after_one = resident_pages(segment);
  REQUIRE(after_one > 0);
  REQUIRE(after_one < kBytes / 4096);
  while (job.run_piece()) {
  }
  REQUIRE(job.done());
  REQUIRE(resident_pages(segment) == kBytes / 4096);
}

// Sanitizers watch threads and exit handlers that a forked child does not have.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("Prefault survives fork, in the middle of a job") {
  SharedSegment segment = SharedSegment::create("libddp-test", 64u << 20);
  const auto job = prefault(segment.data(), 64u << 20);
  const auto results = libddp::test::fork_ranks(2, [&](int) -> std::string {
    job->cancel();  // nobody works on it here: must not wait
    SharedSegment own = SharedSegment::create("libddp-test", kBytes);
    const auto own_job = prefault(own.data(), kBytes);
    libddp::test::expect(wait_until_done(*own_job), "the child has a thread of its own");
    return "";
  });
  for (const auto& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
  job->cancel();
}
#endif
