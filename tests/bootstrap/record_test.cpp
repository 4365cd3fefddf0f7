// The form of what ranks tell each other as text: exact, and safe to read from strangers.

#include "libddp/bootstrap/record.h"

#include <limits>
#include <string>

#include "libddp/base/build_info.h"
#include "libddp/base/error.h"
#include "libddp/bootstrap/key_value_store.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

constexpr RecordForm kForm{"libddp-test-2", "the store holds no test"};
constexpr int kMaxInt = std::numeric_limits<int>::max();

/// Reads a number in [0, 99] and a text.
std::string read(const std::string& text) {
  RecordReader fields(kForm, text);
  const int number = fields.integer(0, 99);
  const std::string field = fields.field();
  fields.end();
  return std::to_string(number) + "|" + field;
}

std::string refusal(const std::string& text) {
  return message_of<StoreError>([&] { read(text); });
}

}  // namespace

TEST_CASE("Fields hold anything") {
  const std::string odd("a 3:b\n\0\xff:\\", 10);
  const std::string text = RecordWriter(kForm).integer(7).field(odd).text();
  REQUIRE(text == "libddp-test-2 " + std::string(version()) + " 1:7 10:" + odd);
  REQUIRE(read(text) == "7|" + odd);
  REQUIRE(read("libddp-test-2 9 1:0 0:") == "0|");
  REQUIRE(RecordReader(kForm, "libddp-test-2 9.9.9").version() == "9.9.9");
  const std::string numbers = RecordWriter(kForm).integer(-kMaxInt).integer(kMaxInt).text();
  RecordReader fields(kForm, numbers);
  REQUIRE(fields.integer(-kMaxInt, 0) == -kMaxInt);
  REQUIRE(fields.integer(0, kMaxInt) == kMaxInt);
}

TEST_CASE("What a writer would not have written is refused and shown") {
  const char* texts[] = {
      "",
      "libddp-test-2",
      "libddp-test-2 ",
      " libddp-test-2 9 1:7 1:x",
      "libddp-test-2  9 1:7 1:x",
      "libddp-test-2\n9 1:7 1:x",
      "libddp-test-2 9\n1:7 1:x",
      "libddp-test-2 9 1:7",
      "libddp-test-2 9 1:7 1:x ",
      "libddp-test-2 9 1:7 1:x\n",
      "libddp-test-2 9 1:7 1:x 1:y",
      "libddp-test-2 9 1:7 2:x",
      "libddp-test-2 9 1:7 18446744073709551615:x",
      "libddp-test-2 9 1:7 99999999999999999999999:x",
      "libddp-test-2 9 1:7 -1:x",
      "libddp-test-2 9 1:7 01:x",
      "libddp-test-2 9 1:7 :x",
      "libddp-test-2 9 1:71:x",
      "libddp-test-2 9 2:+7 1:x",
      "libddp-test-2 9 2:07 1:x",
      "libddp-test-2 9 2:-0 1:x",
      "libddp-test-2 9 2:-1 1:x",
      "libddp-test-2 9 3:100 1:x",
      "libddp-test-2 9 11:99999999999 1:x",
      "libddp-test-2 9 0: 1:x",
      "libddp-tests-2 9 1:7 1:x",
  };
  for (const std::string text : texts) {
    INFO(text);
    const std::string message = refusal(text);
    CHECK(contains(message, "libddp: the store holds no test but '"));
    CHECK(contains(message, "Hint: all ranks must run the same libddp version"));
  }
  CHECK(contains(refusal("\x1b[2J\xff"), "but '\\x1b[2J\\xff'"));
}

TEST_CASE("A text beyond the limit is refused before it is read, and shown in part") {
  const std::string huge =
      RecordWriter(kForm).integer(1).field(std::string(kMaxValueBytes, 'x')).text();
  const std::string message = refusal(huge);
  REQUIRE(contains(message, "no test but 'libddp-test-2 "));
  REQUIRE(message.size() < 500);
}

TEST_CASE("Another version of a form is told with both formats and both versions") {
  const std::string mine = "this one libddp " + std::string(version()) + " ('libddp-test-2')";
  const std::string newer = refusal("libddp-test-3 9.9.9 what ever");
  CHECK(contains(newer, "a rank runs libddp 9.9.9 ('libddp-test-3'), " + mine));
  CHECK(contains(refusal("libddp-test-1\n3\n4"),
                 "a rank runs another version ('libddp-test-1'), " + mine));
  const std::string rude = refusal("libddp-test-\x1b " + std::string(5000, '\a'));
  CHECK(contains(rude, "('libddp-test-\\x1b')"));
  CHECK(rude.size() < 500);
}
