#include "libddp/slots/fresh_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr std::size_t kBlock = DirectWriter::kBlockBytes;

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::byte> bytes_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

/// As a slot's: it begins with a page.
struct Page {
  explicit Page(const std::vector<std::byte>& bytes)
      : memory(static_cast<std::byte*>(
                   std::aligned_alloc(kBlock, (bytes.size() + kBlock) / kBlock * kBlock)),
               &std::free),
        span(memory.get(), bytes.size()) {
    std::copy(bytes.begin(), bytes.end(), memory.get());
  }
  std::unique_ptr<std::byte, decltype(&std::free)> memory;
  std::span<const std::byte> span;
};

}  // namespace

TEST_CASE("pieces of all sizes and kinds come one behind the other", "[file]") {
  TemporaryFolder folder;
  std::mt19937_64 random(11);
  for (int trial = 0; trial < 30; ++trial) {
    const std::string path = folder.path() + "/f";
    std::vector<std::byte> expected;
    std::vector<Page> kept;
    {
      FreshFile file(path);
      if (trial % 2) file.reserve(std::uint64_t{1} << 20);
      for (int i = 0; i < 8; ++i) {
        const bool is_large = random() % 4 != 0;
        std::size_t count = random() % (is_large ? 400'000 : 9'000);
        if (random() % 3 != 0) count = count / kBlock * kBlock;
        std::vector<std::byte> bytes = random_bytes(count, random());
        expected.insert(expected.end(), bytes.begin(), bytes.end());
        if (random() % 2) {
          kept.emplace_back(bytes);
          file.append(kept.back().span, /*stays=*/true);
        } else {
          file.append(bytes, /*stays=*/false);
        }
        std::fill(bytes.begin(), bytes.end(), std::byte{7});
      }
      REQUIRE(list_folder(folder.path()).contains("f.part"));
      file.put_in_place();
    }
    REQUIRE(list_folder(folder.path()) == std::set<std::string>{"f"});
    if (trial % 2) expected.resize(std::max<std::size_t>(expected.size(), 1 << 20));
    REQUIRE(bytes_in(path) == expected);
  }
}

TEST_CASE("a file that is given up goes, whatever is on its way", "[file]") {
  TemporaryFolder folder;
  const Page bytes(random_bytes(4u << 20, 1));
  for (int count = 0; count < 4; ++count) {
    FreshFile file(folder.path() + "/f");
    for (int i = 0; i < count; ++i) file.append(bytes.span, /*stays=*/true);
  }
  REQUIRE(folder.is_empty());
}

TEST_CASE("what the disk refuses behind the caller is told", "[file]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/f";
  const Page bytes(random_bytes(1u << 20, 1));
  for (const bool stays : {false, true}) {
    const auto results = fork_ranks(1, [&](int) -> std::string {
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{.rlim_cur = 5u << 19, .rlim_max = 5u << 19};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      return message_of<SnapshotError>([&] {
        FreshFile file(path);
        for (int i = 0; i < 4; ++i) file.append(bytes.span, stays);
        file.put_in_place();
      });
    });
    REQUIRE(results[0].ok());
    REQUIRE(contains(results[0].text, path));
    REQUIRE(contains(results[0].text, "write: File too large"));
    REQUIRE(folder.is_empty());
  }
}

TEST_CASE("what a file system takes only in the ordinary way is written so", "[file]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/f";
  const Page bytes(random_bytes(1u << 20, 1));
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  {
    DirectWriter writer(path, fd.get());
    if (writer.is_usable()) {
      // A block of no disk: as where the file system asks for larger ones.
      writer.write(bytes.span.subspan(0, 4095), 1, /*stays=*/true);
      writer.write(bytes.span.subspan(4095, 1), 0, /*stays=*/true);
      REQUIRE(writer.finish() == 0);
      REQUIRE(!writer.is_usable());
      const std::vector<std::byte> found = bytes_in(path);
      REQUIRE(found.size() == kBlock);
      REQUIRE(std::equal(found.begin() + 1, found.end(), bytes.span.begin()));
      REQUIRE(found[0] == bytes.span[4095]);
    }
  }
  DirectWriter none(folder.path() + "/none", fd.get());
  REQUIRE(!none.is_usable());
  none.write(bytes.span, 0, /*stays=*/false);
  REQUIRE(none.finish() == 0);
  REQUIRE(bytes_in(path) == std::vector<std::byte>(bytes.span.begin(), bytes.span.end()));
}
