// C10dBackend: all_gather, gather, scatter, all_to_all.

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

Tensors empty_like_ranks(int count, at::IntArrayRef sizes) {
  Tensors tensors;
  for (int i = 0; i < count; ++i) tensors.push_back(full_of(sizes, -1));
  return tensors;
}

}  // namespace

TEST_CASE("allgather gathers each of several inputs into every list", "[c10d]") {
  const int inputs_per_rank = GENERATE(1, 2, 3);
  run_backends(2, [&](C10dBackend& backend, int rank) {
    Tensors inputs;
    TensorLists outputs;
    for (int i = 0; i < inputs_per_rank; ++i) {
      inputs.push_back(full_of({2}, inputs_per_rank * rank + i));
      outputs.push_back(empty_like_ranks(2 * inputs_per_rank, {2}));
    }
    backend.allgather(outputs, inputs, {})->wait();
    for (const Tensors& list : outputs) {
      for (std::size_t j = 0; j < list.size(); ++j) {
        expect_equal(list[j], full_of({2}, static_cast<double>(j)), "entry");
      }
    }
  });
}

TEST_CASE("allgather takes outputs that match in elements, not in shape", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    TensorLists outputs = {empty_like_ranks(2, {1})};
    Tensors inputs = {full_of({}, rank)};
    backend.allgather(outputs, inputs, {})->wait();
    expect_equal(outputs[0][1], full_of({1}, 1), "0-dim into [1]");
  });
}

TEST_CASE("allgather takes parts of different sizes", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    TensorLists outputs = {{full_of({1}, -1), full_of({2}, -1), full_of({3}, -1)}};
    Tensors inputs = {full_of({rank + 1}, rank)};
    backend.allgather(outputs, inputs, {})->wait();
    for (int r = 0; r < 3; ++r) expect_equal(outputs[0][r], full_of({r + 1}, r), "part");
  });
}

TEST_CASE("allgather into tensors: cat, stack and coalesced form", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    at::Tensor input = full_of({3}, rank);
    at::Tensor cat = full_of({6}, -1);
    backend._allgather_base(cat, input, {})->wait();
    expect_equal(cat.narrow(0, 3, 3), full_of({3}, 1), "cat");

    at::Tensor stack = full_of({2, 3}, -1);
    backend._allgather_base(stack, input, {})->wait();
    expect_equal(stack[1], full_of({3}, 1), "stack");

    Tensors outputs = {full_of({2}, -1), full_of({4}, -1)};
    Tensors inputs = {full_of({1}, rank), full_of({2}, 10 + rank)};
    backend.allgather_into_tensor_coalesced(outputs, inputs, {})->wait();
    expect_equal(outputs[0].narrow(0, 1, 1), full_of({1}, 1), "first");
    expect_equal(outputs[1].narrow(0, 2, 2), full_of({2}, 11), "second");
  });
}

TEST_CASE("allgather_coalesced has a list per rank", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors inputs = {full_of({2}, rank), full_of({0}, 0), full_of({3}, 10 + rank)};
    TensorLists outputs;
    for (int r = 0; r < 2; ++r)
      outputs.push_back({full_of({2}, -1), full_of({0}, 0), full_of({3}, -1)});
    backend.allgather_coalesced(outputs, inputs, {})->wait();
    for (int r = 0; r < 2; ++r) {
      expect_equal(outputs[r][0], full_of({2}, r), "first");
      expect_equal(outputs[r][2], full_of({3}, 10 + r), "third");
    }
  });
}

TEST_CASE("gather and scatter have lists on the root only", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    for (int root = 0; root < 3; ++root) {
      TensorLists gathered;
      if (rank == root) gathered.push_back(empty_like_ranks(3, {2}));
      Tensors inputs = {full_of({2}, rank)};
      c10d::GatherOptions gather;
      gather.rootRank = root;
      backend.gather(gathered, inputs, gather)->wait();
      if (rank == root) expect_equal(gathered[0][2], full_of({2}, 2), "gathered");

      TensorLists parts;
      if (rank == root) parts.push_back({full_of({2}, 5), full_of({2}, 6), full_of({2}, 7)});
      Tensors outputs = {full_of({2}, -1)};
      c10d::ScatterOptions scatter;
      scatter.rootRank = root;
      backend.scatter(outputs, parts, scatter)->wait();
      expect_equal(outputs[0], full_of({2}, 5 + rank), "scattered");
    }
  });
}

TEST_CASE("alltoall in tensor and list form", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    at::Tensor input = full_of({3, 2}, rank);
    at::Tensor output = full_of({3, 2}, -1);
    std::vector<std::int64_t> even;
    backend.alltoall_base(output, input, even, even, {})->wait();
    for (int r = 0; r < 3; ++r) expect_equal(output[r], full_of({2}, r), "even rows");

    // Rank r sends r + 1 rows to everyone.
    at::Tensor many = full_of({3 * (rank + 1)}, rank);
    at::Tensor mixed = full_of({6}, -1);
    std::vector<std::int64_t> in(3, rank + 1);
    std::vector<std::int64_t> out = {1, 2, 3};
    backend.alltoall_base(mixed, many, out, in, {})->wait();
    expect_equal(mixed.narrow(0, 3, 3), full_of({3}, 2), "uneven rows");

    Tensors inputs = {full_of({1}, 10 * rank), full_of({2}, 10 * rank), full_of({3}, 10 * rank)};
    Tensors outputs = empty_like_ranks(3, {rank + 1});
    backend.alltoall(outputs, inputs, {})->wait();
    for (int r = 0; r < 3; ++r) expect_equal(outputs[r], full_of({rank + 1}, 10 * r), "list form");
  });
}
