#include "libddp/slots/read_plan.h"

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

constexpr std::int64_t kNumel = 100;

Piece part(const std::string& key, std::int64_t begin, std::int64_t end) {
  return {.key = key, .dtype = "F32", .shape = {kNumel}, .begin = begin, .end = end};
}

WantedPiece wanted(std::vector<float>& to, std::int64_t begin, std::int64_t end) {
  return {.key = "w",
          .dtype = "F32",
          .shape = {kNumel},
          .begin = begin,
          .end = end,
          .to = reinterpret_cast<std::byte*>(to.data())};
}

}  // namespace

TEST_CASE("any number of ranks reads what any number stored", "[plan]") {
  for (int stored : {1, 2, 3, 7}) {
    std::vector<PieceLayout> layouts;
    const auto share = [](int rank, int world) { return kNumel * rank / world; };
    for (int i = 0; i < stored; ++i) {
      layouts.push_back(PieceLayout::of(
          {part("v", 0, kNumel), part("w", share(i, stored), share(i + 1, stored))}));
    }
    std::vector<const PieceLayout*> sources;
    for (const PieceLayout& layout : layouts) sources.push_back(&layout);
    for (int readers : {1, 2, 3, 5}) {
      for (int i = 0; i < readers; ++i) {
        std::vector<float> to(kNumel);
        const std::int64_t begin = share(i, readers);
        const std::int64_t end = share(i + 1, readers);
        const ReadPlan plan = plan_read({wanted(to, begin, end)}, sources, "step 7");
        REQUIRE(plan.missing.empty());
        std::vector<int> times(kNumel);
        for (std::size_t s = 0; s < sources.size(); ++s) {
          const Piece& piece = *sources[s]->find("w");
          for (const Segment& segment : plan.segments[s]) {
            const auto first =
                piece.begin + static_cast<std::int64_t>((segment.offset - piece.offset) / 4);
            const auto at = reinterpret_cast<float*>(segment.to) - to.data();
            REQUIRE(at + begin == first);
            for (std::uint64_t j = 0; j < segment.bytes / 4; ++j) {
              ++times[static_cast<std::size_t>(first) + j];
            }
          }
        }
        for (std::int64_t j = 0; j < kNumel; ++j) {
          REQUIRE(times[static_cast<std::size_t>(j)] == (j >= begin && j < end));
        }
      }
    }
  }
}

TEST_CASE("what nobody stored is named", "[plan]") {
  std::vector<float> to(kNumel);
  const PieceLayout first = PieceLayout::of({part("w", 0, 30)});
  const PieceLayout last = PieceLayout::of({part("w", 60, 100)});
  REQUIRE(plan_read({wanted(to, 0, 100)}, {&first, &last}, "step 7").missing ==
          "elements 30 to 100 of 'w'");
  REQUIRE(plan_read({wanted(to, 70, 100)}, {&first, &last}, "step 7").missing.empty());
  REQUIRE(plan_read({wanted(to, 0, 0)}, {&first}, "step 7").missing.empty());
  REQUIRE(plan_read({wanted(to, 0, 100)}, {}, "step 7").missing == "elements 0 to 100 of 'w'");
}

TEST_CASE("another dtype or shape is refused", "[plan]") {
  std::vector<float> to(kNumel);
  const PieceLayout layout = PieceLayout::of({part("w", 0, 100)});
  WantedPiece other = wanted(to, 0, 100);
  other.dtype = "F64";
  REQUIRE(contains(message_of<ArgumentError>([&] { plan_read({other}, {&layout}, "step 7"); }),
                   "step 7: 'w' was stored as F32 [100], here it is F64 [100]"));
  other = wanted(to, 0, 100);
  other.shape = {10, 10};
  REQUIRE(contains(message_of<ArgumentError>([&] { plan_read({other}, {&layout}, "step 7"); }),
                   "here it is F32 [10, 10]"));
}
