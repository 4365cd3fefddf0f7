#include "libddp/slots/memory_limit.h"

#include <fstream>
#include <limits>

#include "libddp/base/files.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using libddp::test::TemporaryFolder;

namespace {

void write(const std::string& path, const std::string& text) {
  REQUIRE(make_folders(folder_of(path)) == 0);
  std::ofstream(path) << text;
}

}  // namespace

TEST_CASE("the tightest limit counts, with its name", "[memory]") {
  TemporaryFolder folder;
  const std::string root = folder.path();
  REQUIRE(memory_limit_in(root).available_bytes == std::numeric_limits<std::uint64_t>::max());
  write(root + "/proc/meminfo", "MemTotal:  100 kB\nMemAvailable:     50 kB\n");
  REQUIRE(memory_limit_in(root).available_bytes == 50 * 1024);
  REQUIRE(memory_limit_in(root).source == "the machine");
  write(root + "/proc/self/cgroup", "1:cpu:/old\n0::/job/7\n");
  const std::string group = root + "/sys/fs/cgroup/job";
  write(group + "/7/memory.max", "max\n");
  write(group + "/7/memory.current", "1000\n");
  REQUIRE(memory_limit_in(root).source == "the machine");
  write(group + "/memory.max", "30000\n");
  write(group + "/memory.current", "25000\n");
  write(group + "/memory.stat", "anon 5000\ninactive_file 4000\n");
  REQUIRE(memory_limit_in(root).available_bytes == 9000);
  REQUIRE(memory_limit_in(root).source == "the control group /job");
  write(root + "/sys/fs/cgroup/memory.max", "100\n");
  write(root + "/sys/fs/cgroup/memory.current", "200\n");
  REQUIRE(memory_limit_in(root).available_bytes == 0);
}

TEST_CASE("this machine has memory left", "[memory]") {
  REQUIRE(memory_limit().available_bytes > 0);
  REQUIRE(memory_limit().available_bytes < std::numeric_limits<std::uint64_t>::max());
}
