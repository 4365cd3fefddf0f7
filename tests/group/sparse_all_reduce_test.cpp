#include "libddp/group/sparse_all_reduce.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

/// `rows` of a [8, 3] tensor, all of `value`; a row may come several times.
at::Tensor rows_of(const std::vector<std::int64_t>& rows, double value,
                   at::ScalarType dtype = at::kFloat) {
  const auto count = static_cast<std::int64_t>(rows.size());
  return at::sparse_coo_tensor(at::tensor(rows, at::kLong).unsqueeze(0),
                               at::full({count, 3}, value, dtype), {8, 3});
}

TEST_CASE("several sparse tensors of any dtype are summed in two messages", "[sparse_sums]") {
  const int world_size = GENERATE(1, 2, 3);
  with_groups(world_size, [&](const Group& group) {
    const int rank = group->rank();
    const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                                at::kLong};
    std::vector<at::Tensor> tensors;
    for (const at::ScalarType dtype : dtypes) {
      // Rank r gives r + 1 times row r, and row 7 once.
      std::vector<std::int64_t> rows(rank + 1, rank);
      rows.push_back(7);
      tensors.push_back(rows_of(rows, 1, dtype));
    }
    const std::uint64_t before = group->sequence_number();
    const std::vector<at::Tensor> sums = sparse_sums(*group, tensors);
    expect(group->sequence_number() - before == 2, "two messages");
    at::Tensor expected = at::zeros({8, 3}, at::kDouble);
    for (int r = 0; r < world_size; ++r) expected.select(0, r).fill_(r + 1);
    expected.select(0, 7).fill_(world_size);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      expect(sums[i].scalar_type() == dtypes[i], "dtype");
      expect(sums[i].is_coalesced() && sums[i]._nnz() == world_size + 1, "coalesced");
      expect(sums[i].to_dense().to(at::kDouble).equal(expected), "sum");
    }
  });
}

TEST_CASE("bf16 is added in fp32, within a rank and over the ranks", "[sparse_sums]") {
  with_groups(2, [](const Group& group) {
    // In bf16 256 + 1 is 256 again.
    std::vector<std::int64_t> rows(256, 1);
    const at::Tensor many = rows_of(rows, 1, at::kBFloat16);
    const at::Tensor one = rows_of({1, 1}, 1, at::kBFloat16);
    const at::Tensor mean =
        sparse_sums(*group, {group->rank() == 0 ? many : one}, 0.5).front().to_dense();
    expect(mean.select(0, 1).equal(at::full({3}, 129, at::kBFloat16)), "(256 + 2) / 2");
  });
}

TEST_CASE("ranks may have nothing, one of them or all", "[sparse_sums]") {
  with_groups(2, [](const Group& group) {
    const at::Tensor none = sparse_zeros(rows_of({}, 0), 1);
    const at::Tensor some = rows_of({2, 5, 2}, 3);
    const auto sums = sparse_sums(*group, {group->rank() == 0 ? none : some, none}, 0.5);
    expect(sums[0].to_dense().equal(some.to_dense() * 0.5), "one rank's");
    expect(sums[1]._nnz() == 0 && sums[1].sizes() == none.sizes(), "nobody's");
    expect(sparse_sums(*group, {none}).front()._nnz() == 0, "nothing at all");
    expect(sparse_sums(*group, {}).empty(), "no tensors");
    expect(some._values().equal(at::full({3, 3}, 3.0)), "the input is not written");
  });
}

TEST_CASE("tensors of another dtype or shape are named on every rank", "[sparse_sums]") {
  const bool is_dtype = GENERATE(true, false);
  with_groups(2, [&](const Group& group) {
    at::Tensor tensor = rows_of({1}, 1);
    if (group->rank() == 1) {
      tensor = is_dtype ? rows_of({1}, 1, at::kDouble) : sparse_zeros(at::zeros({9, 3}), 1);
    }
    const std::string text = message_of<PeerError>([&] { sparse_sums(*group, {tensor}); });
    expect(contains(text, "rank 0 has Float [8, 3] with 1 sparse"), text);
    expect(contains(text, is_dtype ? "rank 1 has Double [8, 3]" : "rank 1 has Float [9, 3]"), text);
  });
}

}  // namespace
}  // namespace libddp
