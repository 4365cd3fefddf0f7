// all_reduce, broadcast, all_gather_into, reduce_scatter against what torch computes.

#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/base/dtype.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                             at::kChar,  at::kByte,   at::kShort,    at::kInt,
                                             at::kLong,  at::kBool};

/// All of them where it is cheap: five ranks on two busy cores take their time for each call.
std::vector<at::ScalarType> dtypes_for(int world_size) {
  return world_size <= 3 ? kDtypes : std::vector<at::ScalarType>{at::kFloat, at::kInt};
}

std::vector<ReduceOp> ops_of(at::ScalarType dtype) {
  if (c10::isFloatingType(dtype)) {
    return {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max};
  }
  return {ReduceOp::Sum,  ReduceOp::Product, ReduceOp::Min, ReduceOp::Max,
          ReduceOp::Band, ReduceOp::Bor,     ReduceOp::Bxor};
}

void check_all_reduce(ProcessGroup& group, at::IntArrayRef sizes) {
  for (const at::ScalarType dtype : dtypes_for(group.size())) {
    for (const ReduceOp op : ops_of(dtype)) {
      at::Tensor tensor = input_of(group.rank(), sizes, dtype);
      group.all_reduce(tensor, {.op = op});
      expect_equal(tensor, reduced(group.size(), sizes, dtype, op),
                   std::string("all_reduce ") + std::string(name(op)));
    }
  }
}

}  // namespace

TEST_CASE("all_reduce equals torch for every dtype and op", "[collectives]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      check_all_reduce(group,
                       group.size() == 2 ? at::IntArrayRef({1000}) : at::IntArrayRef({3, 5}));
    });
  }
}

TEST_CASE("sixteen ranks reduce", "[collectives]") {
  run_group(16, [](ProcessGroup& group) {
    at::Tensor tensor = input_of(group.rank(), {300}, at::kFloat);
    group.all_reduce(tensor);
    expect_equal(tensor, reduced(16, {300}, at::kFloat, ReduceOp::Sum), "sum");
  });
}

TEST_CASE("large tensors reduce in and outside the arena", "[collectives]") {
  run_group(2, [](ProcessGroup& group) {
    const std::vector<std::int64_t> sizes{1500007};
    const at::Tensor expected = reduced(2, sizes, at::kFloat, ReduceOp::Sum);
    at::Tensor ordinary = input_of(group.rank(), sizes, at::kFloat);
    group.all_reduce(ordinary);
    expect_equal(ordinary, expected, "ordinary");
    at::Tensor arena = group.allocate(sizes);
    arena.copy_(input_of(group.rank(), sizes, at::kFloat));
    group.all_reduce(arena);
    expect_equal(arena, expected, "arena");
  });
}

TEST_CASE("a tensor of the arena outlives its group", "[collectives]") {
  at::Tensor kept;
  run_group(1, [&](ProcessGroup& group) { kept = group.allocate({4, 4}).fill_(3); });
  expect_equal(kept, at::full({4, 4}, 3, at::kFloat), "kept");
}

TEST_CASE("scale multiplies the result", "[collectives]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor tensor = input_of(group.rank(), {9}, at::kFloat);
    group.all_reduce(tensor, {.op = ReduceOp::Sum, .scale = 0.25});
    expect_equal(tensor, reduced(2, {9}, at::kFloat, ReduceOp::Sum).mul(0.25), "scaled");
  });
}

TEST_CASE("broadcast copies the root's tensor", "[collectives]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      for (int root = 0; root < group.size(); ++root) {
        for (const at::ScalarType dtype : dtypes_for(2 * group.size())) {
          at::Tensor tensor = input_of(group.rank(), {2, 7}, dtype);
          group.broadcast(tensor, root);
          expect_equal(tensor, input_of(root, {2, 7}, dtype), "broadcast");
        }
      }
    });
  }
}

TEST_CASE("all_gather_into takes the cat and the stack form", "[collectives]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      for (const at::ScalarType dtype : dtypes_for(p)) {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < p; ++rank) inputs.push_back(input_of(rank, {3, 4}, dtype));
        at::Tensor output = at::zeros({3 * p, 4}, dtype);
        group.all_gather_into(output, input_of(group.rank(), {3, 4}, dtype));
        expect_equal(output, at::cat(inputs), "cat");
        at::Tensor stacked = at::zeros({p, 3, 4}, dtype);
        group.all_gather_into(stacked, input_of(group.rank(), {3, 4}, dtype));
        expect_equal(stacked, at::cat(inputs).view({p, 3, 4}), "stack");
      }
    });
  }
}

TEST_CASE("all_gather_into works in place", "[collectives]") {
  run_group(3, [](ProcessGroup& group) {
    at::Tensor output = at::zeros({3, 5});
    output[group.rank()].copy_(input_of(group.rank(), {5}, at::kFloat));
    group.all_gather_into(output, output[group.rank()]);
    for (int rank = 0; rank < 3; ++rank) {
      expect_equal(output[rank], input_of(rank, {5}, at::kFloat), "block");
    }
  });
}

TEST_CASE("reduce_scatter gives each rank its block", "[collectives]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      for (const at::ScalarType dtype : dtypes_for(2 * p)) {
        for (const ReduceOp op : ops_of(dtype)) {
          const at::Tensor expected =
              reduced(p, {p * 3, 2}, dtype, op).narrow(0, group.rank() * 3, 3);
          const at::Tensor input = input_of(group.rank(), {p * 3, 2}, dtype);
          at::Tensor output = at::zeros({3, 2}, dtype);
          group.reduce_scatter_into(output, input, {.op = op});
          expect_equal(output, expected, "into");
          at::Tensor listed = at::zeros({3, 2}, dtype);
          group.reduce_scatter(listed, input.chunk(p), {.op = op});
          expect_equal(listed, expected, "list");
        }
      }
    });
  }
}

TEST_CASE("reduce_scatter takes uneven blocks", "[collectives]") {
  run_group(3, [](ProcessGroup& group) {
    const std::vector<std::int64_t> rows{4, 0, 3};
    const at::Tensor input = input_of(group.rank(), {7, 2}, at::kFloat);
    const auto own = static_cast<std::size_t>(group.rank());
    at::Tensor output = at::zeros({rows[own], 2});
    group.reduce_scatter(output, input.split_with_sizes(rows));
    const at::Tensor sum = reduced(3, {7, 2}, at::kFloat, ReduceOp::Sum);
    expect_equal(output, sum.split_with_sizes(rows)[own], "uneven");
  });
}

TEST_CASE("complex tensors are summed and averaged as pairs", "[collectives]") {
  run_group(2, [](ProcessGroup& group) {
    const auto make = [](int rank) {
      return at::complex(input_of(rank, {6}, at::kFloat), input_of(rank + 1, {6}, at::kFloat));
    };
    at::Tensor tensor = make(group.rank());
    group.all_reduce(tensor);
    expect_equal(tensor, make(0).add(make(1)), "sum");
    at::Tensor average = make(group.rank());
    group.all_reduce(average, {.op = ReduceOp::Avg});
    expect_equal(average, make(0).add(make(1)).div(2), "average");
    at::Tensor copy = make(group.rank());
    group.broadcast(copy, 1);
    expect_equal(copy, make(1), "broadcast");
  });
}

TEST_CASE("tensors that are not contiguous are handled by copies", "[collectives]") {
  run_group(3, [](ProcessGroup& group) {
    const int rank = group.rank();
    const at::Tensor sum = reduced(3, {4, 6}, at::kFloat, ReduceOp::Sum);
    // Transposed on one rank, strided on another, plain on the third.
    at::Tensor tensor = input_of(rank, {4, 6}, at::kFloat);
    if (rank == 0) tensor = tensor.t().contiguous().t();
    if (rank == 1) {
      at::Tensor wide = at::zeros({4, 12});
      tensor = wide.slice(1, 0, 12, 2).copy_(tensor);
    }
    group.all_reduce(tensor, {}, {.async = rank == 2})->wait();
    expect_equal(tensor, sum, "all_reduce");
    const std::vector<std::int64_t> strides = rank == 0   ? std::vector<std::int64_t>{1, 4}
                                              : rank == 1 ? std::vector<std::int64_t>{12, 2}
                                                          : std::vector<std::int64_t>{6, 1};
    expect(tensor.strides() == at::IntArrayRef(strides), "strides stay");
    group.broadcast(tensor.t(), 1);
    expect_equal(tensor, sum, "broadcast");
    at::Tensor output = at::zeros({6, 12}).t();
    group.all_gather_into(output, tensor);
    expect_equal(output, at::cat({sum, sum, sum}), "all_gather_into");
  });
}

TEST_CASE("zero-size tensors are legal", "[collectives]") {
  run_group(3, [](ProcessGroup& group) {
    at::Tensor nothing = at::empty({0, 4});
    group.all_reduce(nothing);
    group.broadcast(nothing, 2);
    at::Tensor output = at::empty({0, 4});
    group.all_gather_into(output, nothing);
    group.reduce_scatter_into(nothing, output);
    group.all_reduce_coalesced({nothing, nothing});
    expect(group.sequence_number() == 5, "every call counts");
  });
}

TEST_CASE("scalars are one element", "[collectives]") {
  run_group(3, [](ProcessGroup& group) {
    at::Tensor scalar = at::full({}, group.rank() + 1.0, at::kFloat);
    group.all_reduce(scalar);
    expect_equal(scalar, at::full({}, 6.0, at::kFloat), "sum");
    at::Tensor output = at::zeros({3});
    group.all_gather_into(output, at::full({}, static_cast<float>(group.rank()), at::kFloat));
    expect(output[2].item<float>() == 2.0f, "gathered");
  });
}

TEST_CASE("coalesced tensors are reduced in one collective", "[collectives]") {
  run_group(3, [](ProcessGroup& group) {
    const std::vector<std::vector<std::int64_t>> shapes{{3}, {2, 5}, {0}, {7}};
    std::vector<at::Tensor> tensors;
    for (const auto& shape : shapes) tensors.push_back(input_of(group.rank(), shape, at::kFloat));
    tensors[1] = tensors[1].t().contiguous().t();
    group.all_reduce_coalesced(tensors, {.op = ReduceOp::Max});
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      expect_equal(tensors[i], reduced(3, shapes[i], at::kFloat, ReduceOp::Max), "part");
    }
    // Neighbours in one storage are reduced where they are.
    at::Tensor flat = input_of(group.rank(), {10}, at::kFloat);
    group.all_reduce_coalesced(flat.split_with_sizes({4, 6}));
    expect_equal(flat, reduced(3, {10}, at::kFloat, ReduceOp::Sum), "adjacent");
    expect(group.sequence_number() == 2, "two collectives");
  });
}

TEST_CASE("leaves that require gradients can be communicated", "[collectives]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor leaf = input_of(group.rank(), {4, 2}, at::kFloat).requires_grad_(true);
    group.broadcast(leaf, 0);
    expect_equal(leaf.detach(), input_of(0, {4, 2}, at::kFloat), "leaf");
    at::Tensor strided = at::zeros({2, 4}).t().detach().requires_grad_(true);
    group.broadcast(group.rank() == 0 ? leaf : strided, 0);
    expect(strided.is_leaf() && strided.requires_grad(), "still a leaf");
  });
}

TEST_CASE("memory that all ranks have in common", "[allocate_shared]") {
  for (const int world_size : {1, 2, 3}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int rank = group.rank();
      // More than one, so that each rank owns some.
      for (int round = 0; round < 2 * group.size(); ++round) {
        const at::Tensor shared = group.allocate_shared({group.size(), 500}, at::kInt);
        shared[rank].fill_(100 * round + rank);
        group.barrier();
        for (int r = 0; r < group.size(); ++r) {
          expect(shared[r].eq(100 * round + r).all().item<bool>(), "what the others wrote");
        }
        group.barrier();
      }
    });
  }
}

TEST_CASE("common memory outlives the rank that owns it", "[allocate_shared]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<at::Tensor> kept(2);
  run_ranks(2, [&](int rank) {
    auto group = ProcessGroup::create(store, {.rank = rank, .world_size = 2, .name = "short"});
    at::Tensor shared = group->allocate_shared({1 << 20});
    if (rank == 0) shared.fill_(3);
    group->barrier();
    if (rank == 1) kept[1] = shared;
    shared = at::Tensor();
    group->barrier();
    // Would take the same memory again if the first block had been freed.
    if (rank == 0) group->allocate({1 << 20}).fill_(-1);
    const at::Tensor second = group->allocate_shared({1 << 20});
    if (rank == 0) second.fill_(-1);
    group->shutdown();
  });
  CHECK(kept[1].eq(3).all().item<bool>());
}
