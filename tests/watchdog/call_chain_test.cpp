// Ranks that compare what they have called: what counts, what does not, and how far back.

#include "libddp/watchdog/call_chain.h"

#include <optional>

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

TEST_CASE("a rank that is always ahead is compared all the same", "[call_chain]") {
  CallChain ahead;
  CallChain behind;
  std::uint64_t number = 0;
  const auto go_ahead = [&](int calls) {
    for (int i = 0; i < calls; ++i) ahead.add(reduction(4), ++number);
    while (const auto news = ahead.news()) behind.hear(0, *news);
  };
  const int lead = GENERATE(100, 2000);
  go_ahead(lead);
  for (std::uint64_t mine = 1; mine < 2000; ++mine) {
    go_ahead(1);
    behind.add(reduction(4), mine);
    REQUIRE_FALSE(behind.compare());
  }
  // Known as soon as the calls that have been told with it have been made here, too.
  std::optional<CallChain::Difference> difference;
  for (std::uint64_t mine = 2000; !difference && mine < 2000 + 48; ++mine) {
    go_ahead(1);
    behind.add(reduction(mine == 2000 ? 5 : 4), mine);
    difference = behind.compare();
  }
  REQUIRE(difference);
  REQUIRE(difference->own == reduction(5).to_string(2000));
  REQUIRE(difference->theirs == reduction(4).to_string(2000));
}

TEST_CASE("more than can be kept of a rank that is far ahead is no difference", "[call_chain]") {
  CallChain ahead;
  CallChain behind;
  for (std::uint64_t number = 1; number <= 3000; ++number) {
    ahead.add(reduction(4), number);
    behind.hear(0, *ahead.news());
  }
  for (std::uint64_t number = 1; number <= 3000; ++number) {
    behind.add(reduction(number == 2999 ? 5 : 4), number);
    if (number < 3000) REQUIRE_FALSE(behind.compare());
  }
  REQUIRE(behind.compare());  // the newest was kept
}

TEST_CASE("the names around a call", "[call_chain]") {
  CallChain chain;
  REQUIRE(chain.sequence() == 0);
  REQUIRE(chain.around(1, 5).empty());
  for (std::uint64_t number = 1; number <= 1000; ++number) chain.add(reduction(number), number);
  REQUIRE(chain.sequence() == 1000);
  const auto calls = chain.around(900, 2);
  REQUIRE(calls.size() == 5);
  REQUIRE(calls.at(898) == reduction(898).to_string(898));
  REQUIRE(chain.around(1001, 3).begin()->first == 998);
  REQUIRE(chain.around(1, 3).empty());  // too long ago
  chain.end();
  REQUIRE(chain.around(900, 2).empty());
}

TEST_CASE("a difference of long ago has its name where it was told in time", "[call_chain]") {
  const std::uint64_t count = GENERATE(400, 2000);
  CallChain one;
  CallChain other;
  for (std::uint64_t number = 1; number <= count; ++number) {
    one.add(reduction(4), number);
    other.add(reduction(number == 1 ? 5 : 4), number);
  }
  while (const auto news = one.news()) other.hear(0, *news);
  const auto difference = other.compare();
  REQUIRE(difference);
  REQUIRE(difference->sequence < count);
  REQUIRE(difference->own == (count == 400 ? reduction(5).to_string(1) : ""));
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
