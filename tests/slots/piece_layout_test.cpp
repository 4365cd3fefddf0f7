#include "libddp/slots/piece_layout.h"

#include <limits>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

Piece whole(const std::string& key, const std::string& dtype, std::vector<std::int64_t> shape) {
  const std::int64_t numel = numel_of(shape);
  return {.key = key, .dtype = dtype, .shape = std::move(shape), .begin = 0, .end = numel};
}

std::string problem_of(const std::string& text) {
  return message_of<SnapshotError>([&] { PieceLayout::parse(text); });
}

}  // namespace

TEST_CASE("pieces lie one behind the other, those of large elements first", "[layout]") {
  const PieceLayout layout = PieceLayout::of(
      {whole("b", "BOOL", {3}), whole("w", "F32", {2, 3}), whole("step", "F64", {})});
  REQUIRE(layout.data_bytes() == 8 + 24 + 3);
  REQUIRE(layout.find("step")->offset == 0);
  REQUIRE(layout.find("w")->offset == 8);
  REQUIRE(layout.find("b")->offset == 32);
  REQUIRE(layout.find("none") == nullptr);
  REQUIRE(layout.text().size() % 8 == 0);
}

TEST_CASE("the text of a layout says all of it", "[layout]") {
  const Piece part{.key = "w", .dtype = "BF16", .shape = {10, 4}, .begin = 8, .end = 24};
  const PieceLayout layout =
      PieceLayout::of({whole("a/b \"c\" \n", "F32", {2}), part, whole("empty", "I64", {0, 5})});
  const PieceLayout same = PieceLayout::parse(layout.text());
  REQUIRE(same.text() == layout.text());
  REQUIRE(same.data_bytes() == layout.data_bytes());
  REQUIRE(same.pieces().size() == 3);
  REQUIRE(same.find("w")->shape == std::vector<std::int64_t>{10, 4});
  REQUIRE(same.find("w")->begin == 8);
  REQUIRE(same.find("w")->end == 24);
  REQUIRE(same.find("empty")->bytes == 0);
  REQUIRE(same.find("a/b \"c\" \n")->bytes == 8);
}

TEST_CASE("a layout without pieces is one", "[layout]") {
  const PieceLayout layout = PieceLayout::of({});
  REQUIRE(layout.data_bytes() == 0);
  REQUIRE(PieceLayout::parse(layout.text()).pieces().empty());
}

TEST_CASE("what cannot be stored is refused by its key", "[layout]") {
  const auto refused = [](Piece piece) {
    return message_of<ArgumentError>([&] { PieceLayout::of({piece}); });
  };
  REQUIRE(contains(refused(whole("w", "F33", {2})), "'w' has the unknown dtype 'F33'"));
  REQUIRE(contains(refused(whole("__metadata__", "F32", {2})), "safetensors's own key"));
  Piece outside = whole("w", "F32", {2});
  outside.end = 3;
  REQUIRE(contains(refused(outside), "the elements 0 to 3 of 2"));
  REQUIRE(contains(refused(whole("w", "F32", {-2})), "the shape [-2]"));
  const auto huge = whole("w", "F64", {std::numeric_limits<std::int64_t>::max()});
  REQUIRE(contains(refused(huge), "too large"));
  REQUIRE(contains(message_of<ArgumentError>([] {
                     PieceLayout::of({whole("w", "F32", {2}), whole("w", "I8", {2})});
                   }),
                   "two tensors have the key 'w'"));
}

TEST_CASE("a damaged layout says what is wrong", "[layout]") {
  REQUIRE(contains(problem_of("[]"), "no object"));
  REQUIRE(contains(problem_of("{"), "not JSON"));
  REQUIRE(contains(problem_of(R"({"w":{},"w":{}})"), "the key 'w' twice"));
  REQUIRE(contains(problem_of(R"({"w":{"shape":[1]}})"), "'dtype' is missing"));
  REQUIRE(contains(problem_of(R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})"),
                   "-1 where a size belongs"));
  REQUIRE(contains(problem_of(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})"),
                   "has 4 bytes, its shape says 8"));
  REQUIRE(contains(problem_of(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"),
                   "begins at byte 4, not at 0"));
  REQUIRE(contains(problem_of(R"({"w":{"dtype":"F32","shape":[1e300],"data_offsets":[0,4]}})"),
                   "where a size belongs"));
  REQUIRE(contains(problem_of(R"({"w":{"dtype":"U8","shape":[9223372036854775807,2],)"
                              R"("data_offsets":[0,4]}})"),
                   "has the shape"));
}

TEST_CASE("a few bytes of layout take neither the stack nor the memory", "[layout]") {
  REQUIRE(contains(problem_of(std::string(100'000, '[')), "deeper than 32 levels"));
  REQUIRE(contains(problem_of(R"({"w":)" + std::string(100, '[')), "deeper than 32 levels"));
}

TEST_CASE("bytes are described by their tensors", "[layout]") {
  const PieceLayout layout = PieceLayout::of({whole("a", "F32", {4}), whole("b", "F32", {4})});
  REQUIRE(layout.describe(8, 20) == "bytes 8 to 16 of 'a', bytes 0 to 4 of 'b'");
}
