// Lists of blocks on a backend that packs them.

#include "libddp/group/block_pairs.h"

#include <ATen/ops/empty.h>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr int kRanks = 3;

}  // namespace

TEST_CASE("several tensors are gathered by one operation", "[block_pairs]") {
  run_group(kRanks, [](ProcessGroup& group) {
    const int rank = group.rank();
    const std::vector<at::Tensor> all = {at::empty({kRanks, 2, 3}), at::empty({5, kRanks}).t()};
    const std::uint64_t before = group.sequence_number();
    group.all_gather_into_coalesced(
        all, {input_of(rank, {2, 3}, at::kFloat), input_of(rank, {5}, at::kFloat)});
    expect(group.sequence_number() == before + 1, "one collective");
    expect_equal(all[0], all_inputs(kRanks, {2, 3}, at::kFloat).to(at::kFloat), "first");
    expect_equal(all[1].contiguous(), all_inputs(kRanks, {5}, at::kFloat).to(at::kFloat), "second");
  });
}

TEST_CASE("several tensors are reduced and scattered by one operation", "[block_pairs]") {
  run_group(kRanks, [](ProcessGroup& group) {
    const int rank = group.rank();
    const std::vector<at::Tensor> parts = {at::empty({2}), at::empty({4})};
    group
        .reduce_scatter_into_coalesced(
            parts, {input_of(rank, {6}, at::kFloat), input_of(rank, {kRanks, 4}, at::kFloat)},
            {.op = ReduceOp::Sum}, {.async = true})
        ->wait();
    expect_equal(parts[0], reduced(kRanks, {6}, at::kFloat, ReduceOp::Sum).narrow(0, 2 * rank, 2),
                 "first");
    expect_equal(parts[1], reduced(kRanks, {kRanks, 4}, at::kFloat, ReduceOp::Sum)[rank], "second");
  });
}

TEST_CASE("lists that do not fit are refused", "[block_pairs]") {
  run_group(2, [](ProcessGroup& group) {
    const at::Tensor two = at::empty({2});
    message_of<ArgumentError>([&] { group.all_gather_into_coalesced({two}, {two, two}); });
    message_of<ArgumentError>([&] { group.all_gather_into_coalesced({two}, {two}); });
    message_of<ArgumentError>([&] { group.reduce_scatter_into_coalesced({}, {}); });
  });
}
