#include "libddp/base/op_description.h"

#include <cstring>
#include <functional>
#include <set>
#include <vector>

#include "tests/support/catch.h"

namespace libddp {
namespace {

OpDescription example() {
  OpDescription description;
  description.kind = OpKind::AllReduce;
  description.dtype = Dtype::Float32;
  description.count = 25600;
  description.num_dims = 2;
  description.shape[0] = 25;
  description.shape[1] = 1024;
  return description;
}

TEST_CASE("text of a call") {
  OpDescription description = example();
  REQUIRE(description.to_string(42) == "all_reduce #42 float32 [25, 1024] SUM");
  std::strcpy(description.label, "bucket 3");
  REQUIRE(description.to_string(42) == "all_reduce #42 float32 [25, 1024] SUM (bucket 3)");
  description.kind = OpKind::Broadcast;
  description.root = 1;
  REQUIRE(description.to_string(7) == "broadcast #7 float32 [25, 1024] root 1 (bucket 3)");
  REQUIRE(OpDescription{}.to_string(3) == "barrier #3");
}

TEST_CASE("text of a shape") {
  OpDescription description = example();
  description.num_dims = 0;
  REQUIRE(description.to_string(1) == "all_reduce #1 float32 [25600] SUM");
  description.count = 1;
  REQUIRE(description.to_string(1) == "all_reduce #1 float32 [] SUM");
  description.num_dims = OpDescription::kMaxDims + 2;
  REQUIRE(description.to_string(1) == "all_reduce #1 float32 [25, 1024, 0, 0, 0, 0, ...] SUM");
}

TEST_CASE("a label that fills its field is cut, not overrun") {
  OpDescription description = example();
  std::memset(description.label, 'x', sizeof(description.label));
  REQUIRE(description.to_string(1).size() ==
          std::strlen("all_reduce #1 float32 [25, 1024] SUM ()") + sizeof(description.label));
}

TEST_CASE("every field changes the fingerprint") {
  using Change = std::function<void(OpDescription&)>;
  const std::vector<Change> changes = {
      [](OpDescription&) {},
      [](OpDescription& d) { d.kind = OpKind::Reduce; },
      [](OpDescription& d) { d.dtype = Dtype::Int32; },
      [](OpDescription& d) { d.reduce_op = ReduceOp::Max; },
      [](OpDescription& d) { d.root = 0; },
      [](OpDescription& d) { d.root = 1; },
      [](OpDescription& d) { d.count = 25601; },
      [](OpDescription& d) { d.num_dims = 1; },
      [](OpDescription& d) { d.shape[0] = 26; },
      [](OpDescription& d) { std::swap(d.shape[0], d.shape[1]); },
  };
  std::set<std::uint64_t> seen;
  for (const Change& change : changes) {
    OpDescription description = example();
    change(description);
    REQUIRE(seen.insert(description.fingerprint(5)).second);
  }
  REQUIRE(seen.insert(example().fingerprint(6)).second);
  for (const char* label : {"bucket 3", "bucket 4", "bucket 3 (transformer.h.0.attn.bias, ...)"}) {
    OpDescription labelled = example();
    std::strcpy(labelled.label, label);
    REQUIRE(seen.insert(labelled.fingerprint(5)).second);
  }
}

}  // namespace
}  // namespace libddp
