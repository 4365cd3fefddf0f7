#include "libddp/transport/link_settings.h"

#include <cstdlib>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

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
  CHECK(settings.to_text() == "sockets_per_link=4 wire_dtype=float32");
  CHECK(settings.to_text() != LinkSettings().to_text());
}

TEST_CASE("A choice for one group comes before the environment") {
  ::setenv("LIBDDP_SOCKETS_PER_LINK", "4", 1);
  ::setenv("LIBDDP_WIRE_DTYPE", "bfloat16", 1);
  const LinkSettings both = LinkSettings::chosen(2, Dtype::Float32);
  CHECK(both.to_text() == "sockets_per_link=2 wire_dtype=float32");
  const LinkSettings neither = LinkSettings::chosen(std::nullopt, std::nullopt);
  CHECK(neither.to_text() == "sockets_per_link=4 wire_dtype=bfloat16");
  ::unsetenv("LIBDDP_SOCKETS_PER_LINK");
  ::unsetenv("LIBDDP_WIRE_DTYPE");
  CHECK(contains(message_of<ArgumentError>([] { LinkSettings::chosen(9, std::nullopt); }),
                 "sockets_per_link=9 is not an integer from 1 to 8. Hint: "));
  CHECK(contains(message_of<ArgumentError>([] { LinkSettings::chosen(1, Dtype::Int8); }),
                 "wire_dtype=int8 is neither float32 nor bfloat16. Hint: "));
}
