#include "libddp/base/printable.h"

#include <string>

#include "libddp/base/log.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;

TEST_CASE("Text of others cannot move the cursor or begin a line") {
  REQUIRE(printable("all_reduce #42 'x' \\n") == "all_reduce #42 'x' \\n");
  REQUIRE(printable("\x1b[2J\r\nlibddp level=INFO\a") == "\\x1b[2J\\x0d\\nlibddp level=INFO\\x07");
  REQUIRE(printable(std::string("a\0b\x7f", 4)) == "a\\x00b\\x7f");
  REQUIRE(printable_lines("one\n\ttwo\x1b[31m") == "one\n\ttwo\\x1b[31m");
}

TEST_CASE("Letters of all languages stay, what is no UTF-8 is shown as bytes") {
  const std::string letters = "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80";  // a umlaut, euro, a face
  REQUIRE(printable(letters) == letters);
  REQUIRE(printable("\xc2\x9b"
                    "31m") == "\\xc2\\x9b31m");  // CSI in one character
  REQUIRE(printable("\x9b"
                    "31m") == "\\x9b31m");
  REQUIRE(printable("\xe2\x82") == "\\xe2\\x82");  // cut
  REQUIRE(printable("\xc0\xaf\xed\xa0\x80\xff") == "\\xc0\\xaf\\xed\\xa0\\x80\\xff");
  REQUIRE(printable("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");
}

TEST_CASE("A log line holds no control character") {
  const std::string line = format_log_line(LogLevel::Warn, "event", {{"key", "\x1b[2J\x7f\xff x"}});
  REQUIRE(contains(line, "key=\"\\x1b[2J\\x7f\\xff x\""));
}
