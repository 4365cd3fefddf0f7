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
  CHECK(settings.sockets_per_link == 4);
  CHECK(settings.to_text() == "LIBDDP_SOCKETS_PER_LINK=4");
  CHECK(settings.to_text() != LinkSettings().to_text());
}
