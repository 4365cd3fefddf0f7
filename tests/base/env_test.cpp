#include "libddp/base/env.h"

#include <climits>
#include <cstdlib>
#include <string>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

constexpr const char* kName = "LIBDDP_TEST_VARIABLE";

// Sets the variable for one scope.
struct Scoped {
  explicit Scoped(const char* value) { ::setenv(kName, value, 1); }
  ~Scoped() { ::unsetenv(kName); }
};

}  // namespace

TEST_CASE("An unset or empty variable is not given") {
  REQUIRE_FALSE(env_text(kName));
  const Scoped empty("");
  REQUIRE_FALSE(env_text(kName));
  REQUIRE_FALSE(env_integer(kName, 0, 9));
  REQUIRE_FALSE(env_choice(kName, {"a"}));
  REQUIRE(env_flag(kName, true));
  REQUIRE_FALSE(env_flag(kName, false));
}

TEST_CASE("Integers are read whole and within bounds") {
  {
    const Scoped value("-17");
    REQUIRE(env_integer(kName, -20, 20) == -17);
    REQUIRE(contains(message_of<ArgumentError>([] { env_integer(kName, 0, 8); }),
                     "LIBDDP_TEST_VARIABLE='-17' is not an integer from 0 to 8. Hint: "));
  }
  for (const char* text : {"1x", "x", " 1", "1.5", "0x10", "99999999999999999999", "+1"}) {
    const Scoped value(text);
    REQUIRE(contains(message_of<ArgumentError>([] { env_integer(kName, LONG_MIN, LONG_MAX); }),
                     std::string("='") + text + "'"));
  }
}

TEST_CASE("Flags have several spellings") {
  for (const char* text : {"1", "true", "YES", "On"}) {
    const Scoped value(text);
    REQUIRE(env_flag(kName, false));
  }
  for (const char* text : {"0", "False", "no", "OFF"}) {
    const Scoped value(text);
    REQUIRE_FALSE(env_flag(kName, true));
  }
  const Scoped value("maybe");
  REQUIRE(contains(message_of<ArgumentError>([] { env_flag(kName, true); }), "is not a flag"));
}

TEST_CASE("Choices come back in their own spelling") {
  const Scoped value("WARN");
  REQUIRE(env_choice(kName, {"debug", "warn"}) == std::string("warn"));
  REQUIRE(contains(message_of<ArgumentError>([] {
                     env_choice(kName, {"a", "b"});
                   }),
                   "='WARN' is not one of a, b"));
}
