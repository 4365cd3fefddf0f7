#include "libddp/base/stack_dump.h"

#include <stdexcept>

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("stacks come from the dumper", "[stack_dump]") {
  const StackDumper before = set_stack_dumper([]() -> std::string { return "here"; });
  REQUIRE(dump_stacks() == "here");
  set_stack_dumper([]() -> std::string { throw std::runtime_error("lost"); });
  REQUIRE(dump_stacks().empty());
  set_stack_dumper(before);
}

TEST_CASE("the main thread's innermost calls stand for a dump", "[stack_dump]") {
  const std::string dump =
      "Thread 0x1 (most recent call first):\n"
      "  File \"/usr/lib/threading.py\", line 1 in run\n"
      "\n"
      "Thread 0x2 (most recent call first):\n"
      "  File \"/a/data.py\", line 31 in load\n"
      "  File \"train.py\", line 12 in step\n"
      "  File \"/a/train.py\", line 50 in main\n"
      "  File \"/a/train.py\", line 60 in <module>\n";
  REQUIRE(brief_stack(dump) == "load (data.py:31) < step (train.py:12) < main (train.py:50)");
  REQUIRE(brief_stack("").empty());
  REQUIRE(brief_stack("  File \"cut").empty());
}
