#include "libddp/transport/link_settings.h"

#include <cstdlib>

#include "libddp/base/error.h"
#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("Settings of links come from the environment") {
  ::unsetenv("LIBDDP_SOCKETS_PER_LINK");
  CHECK(LinkSettings::from_environment().sockets_per_link == 1);
  ::setenv("LIBDDP_SOCKETS_PER_LINK", "4", 1);
  const LinkSettings settings = LinkSettings::from_environment();
  ::setenv("LIBDDP_SOCKETS_PER_LINK", "9", 1);
  CHECK_THROWS_AS(LinkSettings::from_environment(), ArgumentError);
  ::unsetenv("LIBDDP_SOCKETS_PER_LINK");
  ::setenv("LIBDDP_WIRE_DTYPE", "BFloat16", 1);
  CHECK(LinkSettings::from_environment().wire_dtype == Dtype::BFloat16);
  ::setenv("LIBDDP_WIRE_DTYPE", "float16", 1);
  CHECK_THROWS_AS(LinkSettings::from_environment(), ArgumentError);
  ::unsetenv("LIBDDP_WIRE_DTYPE");
  CHECK(settings.sockets_per_link == 4);
  CHECK(settings.to_text() == "LIBDDP_SOCKETS_PER_LINK=4 LIBDDP_WIRE_DTYPE=float32");
  CHECK(settings.to_text() != LinkSettings().to_text());
}
