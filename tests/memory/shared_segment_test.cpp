#include "libddp/memory/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

UniqueFd duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

TEST_CASE("SharedSegment starts with zeros and is seen through a second mapping") {
  SharedSegment mine = SharedSegment::create("libddp-test", 100'000);
  REQUIRE(mine.size_bytes() == 100'000);
  REQUIRE(mine.data()[99'999] == std::byte{0});
  SharedSegment theirs = SharedSegment::map(duplicate(mine.fd()));
  REQUIRE(theirs.size_bytes() == 100'000);
  REQUIRE(theirs.data() != mine.data());
  mine.data()[5] = std::byte{42};
  REQUIRE(theirs.data()[5] == std::byte{42});
}

TEST_CASE("SharedSegment is closed on exec, sealed, and named in the maps") {
  SharedSegment segment = SharedSegment::create("libddp-test-name", 4096);
  REQUIRE((::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC) != 0);
  REQUIRE(::ftruncate(segment.fd(), 100) == -1);
  REQUIRE(::ftruncate(segment.fd(), 1 << 20) == -1);
  std::ifstream maps("/proc/self/maps");
  const std::string text((std::istreambuf_iterator<char>(maps)), {});
  REQUIRE(contains(text, "libddp-test-name"));
}

TEST_CASE("Large SharedSegments stand on huge-page boundaries") {
  for (std::size_t size : {std::size_t{2} << 20, (std::size_t{5} << 20) + 12345}) {
    SharedSegment segment = SharedSegment::create("libddp-test", size);
    REQUIRE(reinterpret_cast<std::uintptr_t>(segment.data()) % (2 << 20) == 0);
    std::memset(segment.data(), 1, size);
  }
}

TEST_CASE("Reserving costs no memory") {
  SharedSegment segment = SharedSegment::create("libddp-test", std::size_t{64} << 30);
  segment.data()[std::size_t{40} << 30] = std::byte{1};
  REQUIRE(segment.data()[std::size_t{40} << 30] == std::byte{1});
}

TEST_CASE("Moving a SharedSegment moves the mapping") {
  SharedSegment first = SharedSegment::create("libddp-test", 4096);
  first.data()[0] = std::byte{7};
  SharedSegment second = std::move(first);
  REQUIRE(first.data() == nullptr);
  first = SharedSegment::create("libddp-test", 8192);
  first = std::move(second);
  REQUIRE(first.size_bytes() == 4096);
  REQUIRE(first.data()[0] == std::byte{7});
}

TEST_CASE("SharedSegment that was reserved is cut, keeps its pages, and is sealed then") {
  constexpr std::size_t kFinal = 5 * 4096 + 17;
  SharedSegment segment = SharedSegment::reserve("libddp-test", 64u << 20);
  REQUIRE((::fcntl(segment.fd(), F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) == 0);
  segment.data()[kFinal - 1] = std::byte{42};
  segment.data()[40u << 20] = std::byte{1};
  segment.seal_at(kFinal);
  REQUIRE(segment.size_bytes() == kFinal);
  struct stat status {};
  REQUIRE(::fstat(segment.fd(), &status) == 0);
  REQUIRE(status.st_size == kFinal);
  REQUIRE(status.st_blocks * 512 == 4096);  // the page at 40 MiB is gone
  REQUIRE(::ftruncate(segment.fd(), 4096) != 0);
  REQUIRE(SharedSegment::find(segment.data(), kFinal));
  REQUIRE(!SharedSegment::find(segment.data(), kFinal + 1));
  const SharedSegment same = SharedSegment::map(duplicate(segment.fd()));
  REQUIRE(same.data()[kFinal - 1] == std::byte{42});
  REQUIRE(same.is_behind(segment.fd()));
  const SharedSegment other = SharedSegment::create("libddp-test", kFinal);
  REQUIRE(!same.is_behind(other.fd()));
  REQUIRE(!same.is_behind(-1));
}

TEST_CASE("SharedSegment errors") {
  REQUIRE(contains(message_of<ArgumentError>([] { SharedSegment::create("none", 0); }),
                   "'none' of 0 bytes"));
  SECTION("a descriptor that is no sealed memory is refused") {
    UniqueFd plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(::ftruncate(plain.get(), 4096) == 0);
    REQUIRE(contains(message_of<NetworkError>([&] { SharedSegment::map(std::move(plain)); }),
                     "not shared memory of fixed size"));
    UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    REQUIRE_THROWS_AS(SharedSegment::map(std::move(null)), NetworkError);
    REQUIRE_THROWS_AS(SharedSegment::map(UniqueFd()), NetworkError);
  }
  SECTION("no address space") {
    REQUIRE(contains(message_of<Error>([] { SharedSegment::create("huge", std::size_t{1} << 62); }),
                     "bytes"));
  }
}

TEST_CASE("SharedSegment is shared with another process") {
  SharedSegment segment = SharedSegment::create("libddp-test", 4096);
  const auto results = libddp::test::fork_ranks(2, [&](int rank) -> std::string {
    segment.data()[rank] = static_cast<std::byte>(rank + 10);
    return "";
  });
  REQUIRE(results[0].ok());
  REQUIRE(results[1].ok());
  REQUIRE(segment.data()[0] == std::byte{10});
  REQUIRE(segment.data()[1] == std::byte{11});
}
