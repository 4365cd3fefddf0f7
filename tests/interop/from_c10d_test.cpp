// Groups over Gloo: every operation gives what libddp's own backend gives.

#include "libddp/interop/from_c10d.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <chrono>

#include "tests/interop/backend_ranks.h"
#include "tests/interop/gloo_ranks.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace std::chrono_literals;
using namespace libddp::test;

namespace {

const std::vector<ReduceOp> kSums{ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max};
const std::vector<ReduceOp> kBits{ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor};

std::vector<ReduceOp> ops_of(at::ScalarType dtype) {
  std::vector<ReduceOp> ops = kSums;
  if (c10::isFloatingType(dtype)) {
    ops.push_back(ReduceOp::Avg);
  } else {
    ops.insert(ops.end(), kBits.begin(), kBits.end());
  }
  return ops;
}

void check_reductions(ProcessGroup& group, at::ScalarType dtype, ReduceOp op, std::int64_t numel) {
  const std::vector<std::int64_t> sizes{numel, 3};
  const at::Tensor expected = reduced(group.size(), sizes, dtype, op);
  at::Tensor tensor = input_of(group.rank(), sizes, dtype);
  group.all_reduce(tensor, {.op = op});
  const auto check = [&](const at::Tensor& result, const char* what) {
    if (dtype == at::kHalf && op == ReduceOp::Avg) {
      // Each input is divided, and so rounded, before Gloo adds them in float16.
      expect(result.to(at::kFloat).allclose(expected.to(at::kFloat), 2e-3, 0), what);
    } else {
      expect_equal(result, expected, what);
    }
  };
  check(tensor, "all_reduce");

  at::Tensor later = input_of(group.rank(), sizes, dtype);
  WorkPtr work = group.all_reduce(later, {.op = op}, {.async = true});
  work->wait();
  check(later, "all_reduce, asynchronous");

  std::vector<at::Tensor> blocks(static_cast<std::size_t>(group.size()),
                                 input_of(group.rank(), sizes, dtype));
  const at::Tensor input = at::cat(blocks);
  const at::Tensor before = input.clone();
  at::Tensor block = at::zeros(sizes, dtype);
  group.reduce_scatter_into(block, input, {.op = op});
  check(block, "reduce_scatter_into");
  expect_equal(input, before, "the input of reduce_scatter_into");
}

/// Blocks of every derived operation: `numel` elements of any dtype.
void check_blocks_move(ProcessGroup& group, at::ScalarType dtype, std::int64_t numel) {
  const auto size = static_cast<std::size_t>(group.size());
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (int rank = 0; rank < group.size(); ++rank) {
    inputs.push_back(input_of(rank, {numel}, dtype));
    outputs.push_back(at::zeros({numel}, dtype));
  }
  const at::Tensor own = inputs[static_cast<std::size_t>(group.rank())];
  const at::Tensor all = at::cat(inputs);
  const int last = group.size() - 1;

  at::Tensor gathered = at::zeros_like(all);
  group.all_gather_into(gathered, own);
  expect_equal(gathered, all, "all_gather_into");
  group.all_gather(outputs, own);
  expect_equal(at::cat(outputs), all, "all_gather");
  at::Tensor sent = group.rank() == last ? own.clone() : at::zeros_like(own);
  group.broadcast(sent, last);
  expect_equal(sent, inputs.back(), "broadcast");
  for (at::Tensor& output : outputs) output.zero_();
  group.gather(group.rank() == last ? outputs : std::vector<at::Tensor>{}, own, last);
  if (group.rank() == last) expect_equal(at::cat(outputs), all, "gather");
  at::Tensor scattered = at::zeros_like(own);
  group.scatter(scattered, group.rank() == 0 ? inputs : std::vector<at::Tensor>{}, 0);
  expect_equal(scattered, own, "scatter");
  group.all_to_all(outputs, std::vector<at::Tensor>(size, own));
  expect_equal(at::cat(outputs), all, "all_to_all");
}

void check_uneven(ProcessGroup& group) {
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> expected;
  for (int rank = 0; rank < group.size(); ++rank) {
    outputs.push_back(at::zeros({rank * 5L}));
    expected.push_back(at::full({rank * 5L}, rank + 1.0));
  }
  group.all_gather(outputs, expected[static_cast<std::size_t>(group.rank())]);
  expect_equal(at::cat(outputs), at::cat(expected), "uneven all_gather");
}

void check_messages(ProcessGroup& group) {
  const int next = (group.rank() + 1) % group.size();
  const int before = (group.rank() + group.size() - 1) % group.size();
  at::Tensor got = at::zeros({1000}, at::kShort);
  group.exchange({{Exchange::Direction::Send, at::full({1000}, group.rank(), at::kShort), next, 7},
                  {Exchange::Direction::Recv, got, before, 7}});
  expect_equal(got, at::full({1000}, before, at::kShort), "exchange");
  if (group.rank() > 0) {
    group.send(at::full({4}, group.rank()), 0, 3);
    return;
  }
  double sum = 0;
  for (int i = 1; i < group.size(); ++i) {
    at::Tensor any = at::zeros({4}, at::kLong);
    const WorkPtr work = group.recv(any, std::nullopt, 3);
    expect(any[0].item<std::int64_t>() == work->source_rank(), "source_rank");
    sum += any[0].item<double>();
  }
  expect(sum == group.size() * (group.size() - 1) / 2, "from any rank");
}

}  // namespace

TEST_CASE("reductions over Gloo, every operation and dtype", "[from_c10d]") {
  const int world = GENERATE(1, 2, 3);
  run_over_gloo(world, [](ProcessGroup& group, int) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
                                       at::kByte, at::kShort, at::kInt, at::kLong, at::kBool}) {
      for (const ReduceOp op : ops_of(dtype)) {
        for (const std::int64_t numel : {0, 7}) check_reductions(group, dtype, op, numel);
      }
    }
  });
}

TEST_CASE("factors over Gloo", "[from_c10d]") {
  run_over_gloo(2, [](ProcessGroup& group, int) {
    at::Tensor scaled = filled(3);
    group.all_reduce(scaled, {.scale = 0.5});
    expect_equal(scaled, filled(3), "scale");
    at::Tensor most = filled(group.rank() + 1.0);
    group.all_reduce(most, {.op = ReduceOp::Max, .scale = 4});
    expect_equal(most, filled(8), "scaled maximum");
    // The sum alone would be infinite.
    at::Tensor large = at::full({3}, 60000, at::kHalf);
    group.all_reduce(large, {.op = ReduceOp::Avg});
    expect_equal(large, at::full({3}, 60000, at::kHalf), "average of large float16");
    at::Tensor leaf = filled(1).requires_grad_();
    group.all_reduce(leaf, {.op = ReduceOp::Avg});
    expect(leaf.grad_fn() == nullptr && leaf.is_leaf(), "autograd sees nothing");
  });
}

TEST_CASE("gathers, scatters, all-to-all and messages over Gloo", "[from_c10d]") {
  const int world = GENERATE(2, 3);
  run_over_gloo(world, [](ProcessGroup& group, int) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kShort, at::kBool}) {
      for (const std::int64_t numel : {0, 1, 1001}) check_blocks_move(group, dtype, numel);
    }
    check_uneven(group);
    check_messages(group);
    group.barrier();
  });
}

TEST_CASE("a group over Gloo says what it is", "[from_c10d]") {
  run_over_gloo(2, [](ProcessGroup& group, int rank) {
    expect(group.rank() == rank && group.size() == 2, "rank and size");
    expect(group.backend_name() == "c10d:gloo" && group.name() == "wrapped", "names");
    expect(group.global_ranks() == std::vector<int>{0, 1}, "global ranks");
    const std::uint64_t before = group.sequence_number();
    at::Tensor tensor = group.allocate({5}, at::kDouble);
    expect(tensor.dtype() == at::kDouble && !group.is_in_arena(tensor), "allocate");
    tensor.fill_(1);
    const WorkPtr work = group.all_reduce(tensor, {}, {.async = true, .label = "bucket 3"});
    expect(contains(work->description(), "all_reduce #1 float64 [5] SUM (bucket 3)"),
           work->description());
    work->wait();
    group.barrier();
    expect(group.sequence_number() == before + 2, "sequence number");
    const std::string split = message_of<StateError>([&] { group.split({0, 1}, "part"); });
    expect(contains(split, "over c10d:gloo has no store") && contains(split, "new_group"), split);
  });
}

TEST_CASE("a group over Gloo is split into groups over Gloo", "[from_c10d]") {
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  KeptGroups kept;
  run_ranks(4, [&](int rank) {
    const Group group =
        kept.keep(from_c10d(local_gloo(store, rank, 4, 60s),
                            {.name = "wrapped", .global_ranks = {10, 11, 12, 13}, .store = store}));
    for (int time = 0; time < 2; ++time) {
      // Two parts of one name at the same time, in another order than the ranks'.
      const Group half =
          kept.keep(group->split(rank < 2 ? std::vector{1, 0} : std::vector{3, 2}, "half"));
      expect(half->backend_name() == "c10d:gloo" && half->name() == "half", "names");
      expect(half->rank() == 1 - rank % 2 && half->size() == 2, "places");
      expect(
          half->global_ranks() == (rank < 2 ? std::vector<int>{11, 10} : std::vector<int>{13, 12}),
          "global ranks");
      at::Tensor tensor = at::full({1000}, rank);
      half->all_reduce(tensor);
      expect(tensor.eq(rank < 2 ? 1 : 5).all().item<bool>(), "the sum of the half");
      const Group alone = half->split({half->rank()}, "alone");
      alone->barrier();
      alone->shutdown();
      half->shutdown();
    }
    const Group odd = kept.keep(group->split({3, 1}, "odd"));
    expect((odd == nullptr) == (rank % 2 == 0), "only members");
    group->barrier();
    group->shutdown();
  });
}

TEST_CASE("a backend of libddp is handed back", "[from_c10d]") {
  run_backends(2, [](C10dBackend& backend, int) {
    auto handle = c10::intrusive_ptr<c10d::Backend>::unsafe_reclaim_from_nonowning(&backend);
    expect(from_c10d(handle) == backend.group(), "its own group");
  });
  REQUIRE_THROWS_AS(from_c10d(c10::intrusive_ptr<c10d::Backend>()), ArgumentError);
}
