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

TEST_CASE("a call of the program stands for a dump whose innermost calls are a library's",
          "[stack_dump]") {
  const std::string library =
      "Thread 0x2 (most recent call first):\n"
      "  File \"/usr/lib/python3.11/threading.py\", line 3 in wait\n"
      "  File \"/venv/lib/python3.11/site-packages/torch/queue.py\", line 4 in get\n"
      "  File \"<frozen runpy>\", line 5 in run\n";
  const std::string brief = "wait (threading.py:3) < get (queue.py:4) < run (<frozen runpy>:5)";
  REQUIRE(brief_stack(library) == brief);
  const std::string own =
      "  File \"/a/data.py\", line 31 in load\n"
      "  File \"/a/train.py\", line 60 in <module>\n";
  REQUIRE(brief_stack(library + own) == brief + " < ... < load (data.py:31)");
}
