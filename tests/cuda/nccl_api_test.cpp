// Which NCCL a process uses: the one that torch calls, also where there are several. What runs here
// is NCCL's own library, as far as it goes without a GPU.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "libddp/cuda/nccl_api.h"
#include "tests/support/catch.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// In a process of its own: what a library is loaded into stays.
RankResult in_child(const std::function<std::string()>& f) {
  return fork_ranks(1, [&](int) {
    NcclApi::install(nullptr);
    return f();
  })[0];
}

void load(const std::string& path) {
  expect(::dlopen(path.c_str(), RTLD_NOW) != nullptr, "the library loads: " + path);
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr),
                                                         &std::free);
  return real ? real.get() : "";
}

std::string copied_into(const TemporaryFolder& folder) {
  const std::string copy = folder.path() + "/libnccl.so.2";
  std::ofstream(copy, std::ios::binary)
      << std::ifstream(LIBDDP_NCCL_LIBRARY, std::ios::binary).rdbuf();
  return copy;
}

}  // namespace

TEST_CASE("versions of NCCL as NCCL writes them", "[nccl][api]") {
  REQUIRE(NcclApi::version_text(22809) == "2.28.9");
  REQUIRE(NcclApi::version_text(23007) == "2.30.7");
  REQUIRE(NcclApi::version_text(2708) == "2.7.8");
}

TEST_CASE("the NCCL that the process has loaded is used", "[nccl][api]") {
  if (std::string(LIBDDP_NCCL_LIBRARY).empty()) {
    WARN("SKIPPED: no libnccl.so.2 beside the headers");
    return;
  }
  const RankResult result = in_child([] {
    load(LIBDDP_NCCL_LIBRARY);
    const NcclApi& api = NcclApi::get();
    expect(api.version >= NcclApi::kOldestVersion, "its version");
    expect(&NcclApi::get() == &api, "once");
    expect(
        nccl_error_text(api, ncclInvalidUsage, nullptr).find("invalid usage") != std::string::npos,
        "its texts");
    return api.path;
  });
  INFO(result.text);
  REQUIRE(result.ok());
  REQUIRE(real_path(result.text) == LIBDDP_NCCL_LIBRARY);
}

TEST_CASE("a further NCCL that somebody has loaded is not used", "[nccl][api]") {
  if (std::string(LIBDDP_NCCL_LIBRARY).empty()) {
    WARN("SKIPPED: no libnccl.so.2 beside the headers");
    return;
  }
  TemporaryFolder folder;
  const std::string copy = copied_into(folder);
  const RankResult result = in_child([&] {
    load(copy);
    return NcclApi::get().path;
  });
  INFO(result.text);
  REQUIRE(result.ok());
  REQUIRE(real_path(result.text) == LIBDDP_NCCL_LIBRARY);
}

/// Run by the next one, with another library preloaded.
TEST_CASE("prints the file of NCCL", "[.preloaded]") {
  load(LIBDDP_NCCL_LIBRARY);  // as torch does it
  std::printf("<%s>", NcclApi::get().path.c_str());
}

TEST_CASE("a preloaded NCCL is everybody's", "[nccl][api]") {
  if (std::string(LIBDDP_NCCL_LIBRARY).empty()) {
    WARN("SKIPPED: no libnccl.so.2 beside the headers");
    return;
  }
  TemporaryFolder folder;
  const std::string copy = copied_into(folder);
  const std::string command =
      "LD_PRELOAD=" + copy + " " + real_path("/proc/self/exe") + " '[.preloaded]'";
  const std::unique_ptr<FILE, int (*)(FILE*)> child(::popen(command.c_str(), "r"), &::pclose);
  REQUIRE(child);
  std::string text(1 << 16, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), child.get()));
  INFO(text);
  REQUIRE(text.find('<' + copy + '>') != std::string::npos);
}
