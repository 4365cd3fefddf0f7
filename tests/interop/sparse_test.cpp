// All-reduce of sparse COO tensors.

#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Rank r has entries 0 .. r, each of value r + 1: different numbers of entries, some shared.
at::Tensor staircase(int rank, int world, at::ScalarType dtype) {
  std::vector<std::int64_t> rows;
  for (int i = 0; i <= rank; ++i) rows.push_back(i);
  const auto count = static_cast<std::int64_t>(rows.size());
  return at::sparse_coo_tensor(at::tensor(rows, at::kLong).unsqueeze(0),
                               full_of({count, 2}, rank + 1, dtype), {world, 2});
}

}  // namespace

TEST_CASE("sparse tensors are summed over ranks", "[sparse]") {
  const int world = GENERATE(1, 2, 3);
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kLong);
  run_backends(world, [&](C10dBackend& backend, int rank) {
    at::Tensor expected = full_of({world, 2}, 0, dtype);
    for (int r = 0; r < world; ++r) expected.add_(staircase(r, world, dtype).to_dense());
    Tensors tensors = {staircase(rank, world, dtype)};
    backend.allreduce(tensors, {})->wait();
    expect(tensors[0].is_coalesced(), "coalesced");
    expect_equal(tensors[0].to_dense(), expected, "sum");
  });
}

TEST_CASE("several sparse tensors in one call, and ranks without entries", "[sparse]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    const at::Tensor none =
        at::sparse_coo_tensor(at::empty({1, 0}, at::kLong), full_of({0, 2}, 0), {3, 2});
    Tensors tensors = {rank == 0 ? none : staircase(1, 3, at::kFloat), none.clone()};
    backend.allreduce(tensors, {})->wait();
    for (const at::Tensor& tensor : tensors) {
      expect_equal(tensor.to_dense(), staircase(1, 3, at::kFloat).to_dense(), "sum");
    }
  });
}

TEST_CASE("sparse shapes that differ are named on every rank", "[sparse]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {staircase(0, 2 + rank, at::kFloat)};
    const std::string text =
        message_of<c10::DistBackendError>([&] { backend.allreduce(tensors, {})->wait(); });
    expect(contains(text, "sparse dimensions do not match"), text);
  });
}

TEST_CASE("an asynchronous sparse sum lets other operations pass", "[sparse]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    std::vector<Tensors> sparse;
    std::vector<C10dBackend::WorkHandle> works;
    Tensors dense = {full_of({4}, 1)};
    c10d::AllreduceOptions options;
    for (int i = 0; i < 5; ++i) {
      sparse.push_back({staircase(rank, 3, at::kFloat)});
      options.asyncOp = (i + rank) % 2 == 0;  // each rank as it likes
      works.push_back(backend.allreduce(sparse.back(), options));
      works.push_back(backend.allreduce(dense, {}));
    }
    if (rank == 0) works.push_back(backend.send(dense, 1, 0));
    if (rank == 1) works.push_back(backend.recv(dense, 0, 0));
    for (const auto& work : works) work->wait();
    at::Tensor expected = full_of({3, 2}, 0);
    for (int r = 0; r < 3; ++r) expected.add_(staircase(r, 3, at::kFloat).to_dense());
    for (const Tensors& tensors : sparse) expect_equal(tensors[0].to_dense(), expected, "sum");
  });
}

TEST_CASE("an asynchronous sparse sum returns before the others come", "[sparse]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {staircase(rank, 2, at::kFloat)};
    Tensors word = {full_of({1}, 7)};
    C10dBackend::WorkHandle work;
    if (rank == 0) work = backend.allreduce(tensors, {});
    rank == 0 ? backend.send(word, 1, 0)->wait() : backend.recv(word, 0, 0)->wait();
    if (rank == 1) work = backend.allreduce(tensors, {});
    work->wait();
    expect_equal(tensors[0].to_dense()[0], full_of({2}, 3), "both ranks' first row");
  });
}
