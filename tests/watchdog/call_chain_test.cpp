// Ranks that compare what they have called: what counts, what does not, and how far back.

#include "libddp/watchdog/call_chain.h"

#include "tests/support/catch.h"

using namespace libddp;

namespace {

OpDescription reduction(std::uint64_t count, Dtype dtype = Dtype::Float32) {
  OpDescription description;
  description.kind = OpKind::AllReduce;
  description.dtype = dtype;
  description.count = count;
  return description;
}

}  // namespace

TEST_CASE("the same calls are no difference", "[call_chain]") {
  CallChain one;
  CallChain other;
  REQUIRE_FALSE(one.news());
  for (std::uint64_t number = 1; number < 10'000; ++number) {
    one.add(reduction(number % 7), number);
    other.add(reduction(number % 7), number);
    if (number % 100 != 0) continue;
    while (const auto news = one.news()) other.hear(0, *news);
    REQUIRE_FALSE(other.compare());
  }
  while (const auto news = one.news()) REQUIRE(news->sequence < 10'000);
  REQUIRE_FALSE(one.news());
}

TEST_CASE("the first call that differs is named", "[call_chain]") {
  const OpDescription wanted = reduction(16);
  OpDescription differing = wanted;
  SECTION("count") { differing.count = 17; }
  SECTION("dtype") { differing.dtype = Dtype::Int32; }
  SECTION("reduction") { differing.reduce_op = ReduceOp::Max; }
  SECTION("root") { differing.root = 1; }
  SECTION("kind") { differing.kind = OpKind::AllGather; }
  CallChain one;
  CallChain other;
  for (std::uint64_t number = 1; number <= 5; ++number) {
    one.add(wanted, number);
    other.add(number == 3 ? differing : wanted, number);
  }
  other.hear(0, *one.news());
  const auto difference = other.compare();
  REQUIRE(difference);
  REQUIRE(difference->rank == 0);
  REQUIRE(difference->own == differing.to_string(3));
  REQUIRE(difference->theirs == wanted.to_string(3));
  REQUIRE_FALSE(other.compare());  // once
}

TEST_CASE("what ranks may see differently is no difference", "[call_chain]") {
  OpDescription mine = reduction(6);
  mine.num_dims = 2;
  mine.shape[0] = 2;
  mine.shape[1] = 3;
  OpDescription theirs = reduction(6);
  theirs.label[0] = 'b';
  OpDescription blocks;
  blocks.kind = OpKind::AllToAll;
  OpDescription even = blocks;
  even.count = 8;
  CallChain one;
  CallChain other;
  one.add(mine, 1);
  one.add(blocks, 2);
  other.add(theirs, 1);
  other.add(even, 2);
  other.hear(0, *one.news());
  REQUIRE_FALSE(other.compare());
}

TEST_CASE("who is behind compares when it has come there", "[call_chain]") {
  CallChain ahead;
  CallChain behind;
  for (std::uint64_t number = 1; number <= 3; ++number) ahead.add(reduction(4), number);
  behind.add(reduction(4), 1);
  behind.hear(5, *ahead.news());
  REQUIRE_FALSE(behind.compare());
  behind.add(reduction(4), 2);
  REQUIRE_FALSE(behind.compare());
  behind.add(reduction(5), 3);
  const auto difference = behind.compare();
  REQUIRE(difference);
  REQUIRE(difference->rank == 5);
}

TEST_CASE("a difference of long ago has its name where it was told in time", "[call_chain]") {
  const std::uint64_t count = GENERATE(200, 2000);
  CallChain one;
  CallChain other;
  for (std::uint64_t number = 1; number <= count; ++number) {
    one.add(reduction(4), number);
    other.add(reduction(number == 1 ? 5 : 4), number);
  }
  while (const auto news = one.news()) other.hear(0, *news);
  const auto difference = other.compare();
  REQUIRE(difference);
  REQUIRE(difference->sequence == count);
  REQUIRE(difference->own == (count == 200 ? reduction(5).to_string(1) : ""));
}

TEST_CASE("what is longer ago than is kept is not compared", "[call_chain]") {
  CallChain one;
  CallChain other;
  one.add(reduction(4), 1);
  const LastCalls told = *one.news();
  for (std::uint64_t number = 1; number <= 5000; ++number) other.add(reduction(5), number);
  other.hear(0, told);
  REQUIRE_FALSE(other.compare());
}

TEST_CASE("a chain that has ended compares nothing", "[call_chain]") {
  CallChain one;
  CallChain other;
  one.add(reduction(4), 1);
  other.add(reduction(5), 1);
  other.hear(0, *one.news());
  other.end();
  REQUIRE_FALSE(other.compare());
  other.hear(0, {.sequence = 1, .chain = 2, .text = "x"});
  REQUIRE_FALSE(other.compare());
}

TEST_CASE("words that are none of ours give no calls", "[call_chain]") {
  REQUIRE(calls_by_number("").empty());
  REQUIRE(calls_by_number("; ; barrier").empty());
  REQUIRE(calls_by_number("a #x; b #7 c").at(7) == "b #7 c");
}
