// The words of torch's Gloo backend in C10dBackend's refusals.

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

template <class Call>
void expect_refusal(const char* words, Call&& call) {
  const std::string text = message_of<c10::Error>(call);
  expect(contains(text, words), text + " has: " + words);
}

}  // namespace

TEST_CASE("broadcast and reduce refuse in torch's words", "[checks]") {
  run_backends(1, [](C10dBackend& backend, int) {
    Tensors one = {full_of({1}, 0)};
    Tensors none;
    Tensors mixed = {full_of({1}, 0), full_of({1}, 0, at::kDouble)};
    Tensors sizes = {full_of({1}, 0), full_of({2}, 0)};
    c10d::BroadcastOptions options;
    options.rootRank = -1;
    expect_refusal("invalid root rank: -1", [&] { backend.broadcast(one, options); });
    options.rootRank = 1;
    expect_refusal("invalid root rank: 1", [&] { backend.broadcast(one, options); });
    options.rootRank = 0;
    options.rootTensor = 1;
    expect_refusal("invalid root tensor: 1", [&] { backend.broadcast(one, options); });
    options.rootTensor = 0;
    expect_refusal("invalid root tensor", [&] { backend.broadcast(none, options); });
    expect_refusal("invalid tensor type", [&] { backend.broadcast(mixed, options); });
    expect_refusal("invalid tensor size", [&] { backend.broadcast(sizes, options); });
    c10d::ReduceOptions reduce;
    expect_refusal("requires a single-element tensor list", [&] { backend.reduce(sizes, reduce); });
    reduce.rootRank = 1;
    expect_refusal("invalid root rank", [&] { backend.reduce(one, reduce); });
  });
}

TEST_CASE("all_reduce refuses in torch's words", "[checks]") {
  run_backends(1, [](C10dBackend& backend, int) {
    Tensors none;
    Tensors mixed = {full_of({1}, 0), full_of({1}, 0, at::kDouble)};
    Tensors sparse = {full_of({2, 2}, 1).to_sparse()};
    expect_refusal("requires non-empty tensor list", [&] { backend.allreduce(none, {}); });
    expect_refusal("invalid tensor type", [&] { backend.allreduce(mixed, {}); });
    expect_refusal("tensors must all have the same type",
                   [&] { backend.allreduce_coalesced(mixed, {}); });
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    expect_refusal("(allreduce of sparse tensors only works with ReduceOp.SUM)",
                   [&] { backend.allreduce(sparse, options); });
  });
}

TEST_CASE("gathers and scatters refuse in torch's words", "[checks]") {
  run_backends(1, [](C10dBackend& backend, int) {
    Tensors one = {full_of({1}, 0)};
    Tensors none;
    Tensors two = {full_of({1}, 0), full_of({1}, 0)};
    TensorLists no_lists;
    TensorLists empty_list = {{}};
    TensorLists good = {{full_of({1}, 0)}};
    TensorLists wrong_type = {{full_of({1}, 0, at::kLong)}};
    expect_refusal("requires non-empty input tensor list",
                   [&] { backend.allgather(no_lists, none, {}); });
    expect_refusal("requires input/output tensor lists to have the same length",
                   [&] { backend.allgather(no_lists, one, {}); });
    expect_refusal("invalid output tensor list", [&] { backend.allgather(empty_list, one, {}); });
    expect_refusal("invalid tensor type", [&] { backend.allgather(wrong_type, one, {}); });
    expect_refusal("output lists should be equal to world size",
                   [&] { backend.allgather_coalesced(no_lists, one, {}); });
    TensorLists wrong_size = {{full_of({2}, 0)}};
    expect_refusal("invalid size of output tensor at index 0",
                   [&] { backend.allgather_coalesced(wrong_size, one, {}); });
    expect_refusal("requires a single-element input tensor list",
                   [&] { backend.gather(good, two, {}); });
    expect_refusal("requires a single-element output list",
                   [&] { backend.gather(no_lists, one, {}); });
    expect_refusal(
        "Incorrect output list size 0. Output list size should be 1, same as size of the process "
        "group.",
        [&] { backend.gather(empty_list, one, {}); });
    expect_refusal(
        "Incorrect input list size 0. Input list size should be 1, same as size of the process "
        "group.",
        [&] { backend.scatter(one, empty_list, {}); });
    expect_refusal("requires a single-element output tensor list",
                   [&] { backend.scatter(two, good, {}); });
    expect_refusal("requires a single-element input list",
                   [&] { backend.scatter(one, no_lists, {}); });
  });
}

TEST_CASE("tensors that differ are counted from the first one", "[checks]") {
  run_backends(1, [](C10dBackend& backend, int) {
    Tensors types = {full_of({1}, 0), full_of({1}, 0, at::kLong)};
    Tensors sizes = {full_of({1}, 0), full_of({2}, 0)};
    TensorLists outputs(2, {full_of({1}, 0), full_of({1}, 0)});
    expect_refusal("invalid tensor type at index 1",
                   [&] { backend.allgather(outputs, types, {}); });
    expect_refusal("invalid tensor size at index 1 (expected (1), got (2))",
                   [&] { backend.allgather(outputs, sizes, {}); });
  });
}

TEST_CASE("all_to_all, reduce_scatter and messages refuse in torch's words", "[checks]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors one = {full_of({1}, 0)};
    Tensors two = {full_of({1}, 0), full_of({1}, 0)};
    TensorLists lists = {{full_of({1}, 0)}};
    at::Tensor pair = full_of({2}, 0);
    at::Tensor three = full_of({3}, 0);
    std::vector<std::int64_t> equal;
    std::vector<std::int64_t> too_many{1, 1, 1};
    std::vector<std::int64_t> too_large{1, 2};
    const auto all_to_all = [&](at::Tensor& output, std::vector<std::int64_t>& splits) {
      backend.alltoall_base(output, pair, splits, equal, {});
    };
    expect_refusal("Tensor's dim 0 does not divide equally across group size",
                   [&] { all_to_all(three, equal); });
    expect_refusal("Number of tensor splits not equal to group size",
                   [&] { all_to_all(pair, too_many); });
    expect_refusal("Split sizes doesn't match total dim 0 size",
                   [&] { all_to_all(pair, too_large); });
    expect_refusal("output tensor list size 1 does not match world size 2",
                   [&] { backend.alltoall(one, two, {}); });
    expect_refusal("invalid input tensor list size, must be world size",
                   [&] { backend.reduce_scatter(one, lists, {}); });
    expect_refusal("takes a single tensor", [&] { backend.send(two, 1 - rank, 0); });
  });
}

TEST_CASE("a non-root passes no lists", "[checks]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    if (rank == 0) return;
    Tensors one = {full_of({1}, 0)};
    TensorLists lists = {{full_of({1}, 0), full_of({1}, 0)}};
    expect_refusal("requires empty output on non-root", [&] { backend.gather(lists, one, {}); });
    expect_refusal("requires empty input on non-root", [&] { backend.scatter(one, lists, {}); });
  });
}
