#include "libddp/watchdog/running_calls.h"

#include "tests/support/catch.h"

using namespace libddp;

TEST_CASE("calls that run elsewhere are told with whom they wait for", "[running_calls]") {
  const RunningCall idle([] { return RunningCallText{"idle", "", {}}; });
  const RunningCall mine([] {
    return RunningCallText{"world", "barrier #3", {"rank 1 (pid 8 on a)"}};
  });
  std::string answer;
  {
    const RunningCall other([] {
      return RunningCallText{"pipe 1",
                             "all_reduce #7 float32 [8] SUM",
                             {"rank 2 (pid 9 on b)", "rank 0 (pid 4 on a)"}};
    });
    answer = running_calls();
  }
  answer += "Thread 0x1 (most recent call first):\n";
  REQUIRE(
      call_elsewhere(answer, "world", "(pid 4 on a)") ==
      ", in all_reduce #7 float32 [8] SUM of group pipe 1, which waits for this rank: all ranks "
      "must call groups in the same order");
  REQUIRE(
      call_elsewhere(answer, "world", "(pid 44 on a)") ==
      ", in all_reduce #7 float32 [8] SUM of group pipe 1, which waits for rank 2 (pid 9 on b), "
      "rank 0 (pid 4 on a)");
  REQUIRE(
      call_elsewhere(answer, "pipe 1", "(pid 8 on a)") ==
      ", in barrier #3 of group world, which waits for this rank: all ranks must call groups in "
      "the same order");
  // The group is gone, and its call with it.
  REQUIRE(call_elsewhere(running_calls(), "world", "(pid 4 on a)").empty());
  REQUIRE(call_elsewhere("libddp: in group x", "world", "(pid 4 on a)").empty());
  REQUIRE(call_elsewhere("libddp: in group x runs barrier #1\n", "world", "")
              .find("in barrier #1 of group x") != std::string::npos);
}

TEST_CASE("the last calls of a group are told by number", "[running_calls]") {
  std::string answer;
  {
    const RunningCall device([] {
      return RunningCallText{"world (cuda)",
                             "all_reduce #8 float32 [2, 4] SUM (bucket 1)",
                             {},
                             {"broadcast #7 float32 [8]", "all_reduce #8 float32 [8] SUM"}};
    });
    const RunningCall idle([] { return RunningCallText{"world", "", {}, {"barrier #7"}}; });
    answer = running_calls();
  }
  REQUIRE(call_in(answer, "world (cuda)") == "all_reduce #8 float32 [2, 4] SUM (bucket 1)");
  const auto calls = last_calls_in(answer, "world (cuda)");
  REQUIRE(calls.size() == 2);
  REQUIRE(calls.at(7) == "broadcast #7 float32 [8]");
  REQUIRE(calls.at(8) == "all_reduce #8 float32 [8] SUM");
  REQUIRE(last_calls_in(answer, "world").at(7) == "barrier #7");
  REQUIRE(last_calls_in(answer, "other").empty());
  REQUIRE(last_calls_in("libddp: group x had ; barrier; #; # 9\n", "x").size() <= 2);
}
