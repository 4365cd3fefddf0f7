// Names of snapshots, and what only looks like one.

#include "libddp/slots/saved_name.h"

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("a name is what it was made of", "[slots][names]") {
  const std::string text = name_of({.step = 700, .sequence = 12});
  REQUIRE(text == "step-700.12");
  NameReader name(text);
  const auto saved = name.saved_step();
  REQUIRE(saved);
  REQUIRE(saved->step == 700);
  REQUIRE(saved->sequence == 12);
  REQUIRE(name.is_over());
}

TEST_CASE("the largest numbers fit, and larger ones are no name", "[slots][names]") {
  const std::string digits(18, '9');
  REQUIRE(NameReader("step-" + digits + "." + digits).saved_step()->step == 999999999999999999);
  REQUIRE_FALSE(NameReader("step-" + digits + "0.1").saved_step());
  REQUIRE_FALSE(NameReader("step-1." + digits + "0").saved_step());
}

TEST_CASE("other names are none", "[slots][names]") {
  for (const char* const text : {"", "step", "step-", "step-1", "step-1.", "step-.1", "step--1.2",
                                 "step-+1.2", "step- 1.2", "Step-1.2", "step-1,2", "xstep-1.2"}) {
    INFO(text);
    REQUIRE_FALSE(NameReader(text).saved_step());
  }
}

TEST_CASE("parts of a name are taken one by one", "[slots][names]") {
  NameReader name("rank-03-of-4.aB9.json");
  REQUIRE_FALSE(name.skip("step-"));
  REQUIRE(name.skip("rank-"));
  REQUIRE(name.number(9) == 3);
  REQUIRE(name.skip("-of-"));
  REQUIRE(name.number(9) == 4);
  REQUIRE_FALSE(name.number(9));
  REQUIRE(name.skip("."));
  REQUIRE(name.word() == "aB9");
  REQUIRE(name.word().empty());
  REQUIRE_FALSE(name.is_over());
  REQUIRE(name.skip(".json"));
  REQUIRE(name.is_over());
}
