// Which NCCL a process uses: the one that is loaded, and one only. What runs here is NCCL's own
// library, as far as it goes without a GPU.

#include <dlfcn.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "libddp/base/error.h"
#include "libddp/cuda/nccl_api.h"
#include "tests/support/catch.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/require_parts.h"
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
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(result.text.c_str(), nullptr),
                                                         &std::free);
  REQUIRE(real);
  REQUIRE(std::string(real.get()) == LIBDDP_NCCL_LIBRARY);
}

TEST_CASE("two NCCLs in one process are an error that names both", "[nccl][api]") {
  if (std::string(LIBDDP_NCCL_LIBRARY).empty()) {
    WARN("SKIPPED: no libnccl.so.2 beside the headers");
    return;
  }
  TemporaryFolder folder;
  const std::string copy = folder.path() + "/libnccl.so.2";
  std::ofstream(copy, std::ios::binary)
      << std::ifstream(LIBDDP_NCCL_LIBRARY, std::ios::binary).rdbuf();
  const RankResult two = in_child([&] {
    load(LIBDDP_NCCL_LIBRARY);
    load(copy);
    return message_of<DeviceError>([] { NcclApi::get(); });
  });
  INFO(two.text);
  REQUIRE(two.ok());
  require_parts(two.text, {"two NCCL libraries", "/nccl/lib/libnccl.so.2", copy, "LD_PRELOAD"});
}
