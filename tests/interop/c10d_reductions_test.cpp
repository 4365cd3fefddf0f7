// C10dBackend: all_reduce, reduce, broadcast, reduce_scatter.

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

c10d::AllreduceOptions all_reduce_options(c10d::ReduceOp op, bool async = true) {
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  options.asyncOp = async;
  return options;
}

// torch's own maker has another name in every other version.
c10d::ReduceOp premultiplied_sum(double factor) {
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return op;
}

double sum_of_ranks(int world) { return world * (world + 1) / 2.0; }

}  // namespace

TEST_CASE("allreduce reduces over ranks, waited for or not", "[c10d]") {
  const int world = GENERATE(1, 2, 3);
  run_backends(world, [&](C10dBackend& backend, int rank) {
    for (const bool async : {false, true}) {
      Tensors tensors = {full_of({3, 5}, rank + 1)};
      backend.allreduce(tensors, all_reduce_options(c10d::ReduceOp::SUM, async))->wait();
      expect_equal(tensors[0], full_of({3, 5}, sum_of_ranks(world)), "sum");
    }
    Tensors tensors = {full_of({4}, rank + 1, at::kLong)};
    backend.allreduce(tensors, all_reduce_options(c10d::ReduceOp::MAX))->wait();
    expect_equal(tensors[0], full_of({4}, world, at::kLong), "max");
  });
}

TEST_CASE("allreduce of several tensors reduces over them too", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors sums = {full_of({2}, 2 * rank), full_of({2}, 2 * rank + 1)};
    backend.allreduce(sums, all_reduce_options(c10d::ReduceOp::SUM))->wait();
    for (const at::Tensor& tensor : sums) expect_equal(tensor, full_of({2}, 6), "sum of four");

    Tensors products = {full_of({2}, rank + 1), full_of({2}, rank + 2)};
    backend.allreduce(products, all_reduce_options(c10d::ReduceOp::PRODUCT))->wait();
    for (const at::Tensor& t : products) expect_equal(t, full_of({2}, 12), "product of four");
  });
}

TEST_CASE("PREMUL_SUM multiplies each rank's input by its own factor", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({3}, 10)};
    auto op = premultiplied_sum(rank == 0 ? 0.5 : 2.0);
    backend.allreduce(tensors, all_reduce_options(op))->wait();
    expect_equal(tensors[0], full_of({3}, 25), "weighted sum");

    at::Tensor input = full_of({4}, 10);
    at::Tensor output = full_of({2}, 0);
    c10d::ReduceScatterOptions options;
    options.reduceOp = premultiplied_sum(0.5);
    backend._reduce_scatter_base(output, input, options)->wait();
    expect_equal(output, full_of({2}, 10), "weighted reduce_scatter");
    expect_equal(input, full_of({4}, 10), "the input is left alone");
  });
}

TEST_CASE("allreduce_coalesced takes mixed sizes of one dtype", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({2}, rank), full_of({3, 3}, 2 * rank), full_of({}, 1)};
    backend.allreduce_coalesced(tensors, {})->wait();
    expect_equal(tensors[0], full_of({2}, 3), "first");
    expect_equal(tensors[1], full_of({3, 3}, 6), "second");
    expect_equal(tensors[2], full_of({}, 3), "scalar");
  });
}

TEST_CASE("reduce gives the result to its root", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    for (int root = 0; root < 3; ++root) {
      Tensors tensors = {full_of({5}, rank + 1)};
      c10d::ReduceOptions options;
      options.rootRank = root;
      backend.reduce(tensors, options)->wait();
      if (rank == root) expect_equal(tensors[0], full_of({5}, 6), "sum");
    }
  });
}

TEST_CASE("broadcast copies the root tensor into all tensors of all ranks", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({2}, 10 * rank), full_of({2}, 10 * rank + 1)};
    c10d::BroadcastOptions options;
    options.rootRank = 1;
    options.rootTensor = 1;
    backend.broadcast(tensors, options)->wait();
    for (const at::Tensor& tensor : tensors) expect_equal(tensor, full_of({2}, 11), "value");
  });
}

TEST_CASE("broadcast moves dtypes that libddp has no name for", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({3}, rank == 0 ? 40000 : 1, at::kInt).to(at::kUInt16)};
    backend.broadcast(tensors, {})->wait();
    expect_equal(tensors[0].to(at::kInt), full_of({3}, 40000, at::kInt), "uint16");
  });
}

TEST_CASE("reduce_scatter in list, tensor and coalesced form", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors outputs = {full_of({2}, 0)};
    TensorLists inputs = {{full_of({2}, rank), full_of({2}, 10 + rank)}};
    backend.reduce_scatter(outputs, inputs, {})->wait();
    expect_equal(outputs[0], full_of({2}, rank == 0 ? 1 : 21), "list form");

    Tensors results = {full_of({1}, 0), full_of({2}, 0)};
    Tensors sources = {full_of({2}, rank + 1), full_of({4}, 1)};
    backend.reduce_scatter_tensor_coalesced(results, sources, {})->wait();
    expect_equal(results[0], full_of({1}, 3), "first");
    expect_equal(results[1], full_of({2}, 2), "second");
  });
}

TEST_CASE("sixteen ranks agree", "[c10d]") {
  run_backends(16, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({1000}, rank + 1)};
    backend.allreduce(tensors, all_reduce_options(c10d::ReduceOp::SUM))->wait();
    expect_equal(tensors[0], full_of({1000}, 136), "sum");
  });
}
