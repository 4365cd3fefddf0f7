// simd_level() is chosen once per process: it is only called in children, so that the order of the
// tests does not matter.

#include <cstdlib>
#include <string>

#include "libddp/base/build_info.h"
#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;

namespace {

libddp::test::RankResult level_under(const char* wish) {
  ::setenv("LIBDDP_SIMD", wish, 1);
  auto results = libddp::test::fork_ranks(
      1, [](int) -> std::string { return std::string(name(simd_level())); });
  ::unsetenv("LIBDDP_SIMD");
  return results[0];
}

}  // namespace

TEST_CASE("LIBDDP_SIMD lowers the path and refuses nonsense") {
  REQUIRE(level_under("scalar").text == "scalar");
  const auto refused = level_under("mmx");
  REQUIRE(refused.exit_code == 1);
  REQUIRE(libddp::test::contains(refused.text, "LIBDDP_SIMD='mmx' is not one of scalar, avx2"));
}

TEST_CASE("The build says what it is") {
  REQUIRE(version().find('.') != std::string_view::npos);
  REQUIRE_FALSE(compiled_simd_levels().empty());
  REQUIRE(compiled_simd_levels().front() == SimdLevel::Scalar);
  REQUIRE(name(SimdLevel::Avx512) == "avx512");
  const auto results = libddp::test::fork_ranks(1, [](int) -> std::string {
    libddp::test::expect(simd_level() <= compiled_simd_levels().back(), "a compiled level");
    libddp::test::expect(
        libddp::test::contains(build_summary(), "simd " + std::string(name(simd_level()))),
        "the level in the summary");
    return build_summary();
  });
  REQUIRE(results[0].ok());
  REQUIRE(libddp::test::contains(results[0].text, "libddp " + std::string(version()) + ", "));
  REQUIRE(libddp::test::contains(results[0].text, compiler()));
}
