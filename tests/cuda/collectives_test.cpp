// What collectives on device tensors compute, over the mock NCCL: the same as on the host.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>

#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

void reduce_all(ProcessGroup& group, c10::Device device, at::ScalarType dtype, ReduceOp op,
                const CallOptions& options) {
  at::Tensor tensor = input_of(group.rank(), {5, 3}, dtype).to(device);
  group.all_reduce(tensor, {.op = op}, options)->wait();
  expect_equal(tensor.cpu(), reduced(kRanks, {5, 3}, dtype, op), std::string(name(op)));
}

}  // namespace

TEST_CASE("all_reduce of all dtypes and reductions that NCCL has", "[nccl]") {
  const auto async = GENERATE(false, true);
  run_device_group(kRanks, [&](ProcessGroup& group, c10::Device device) {
    const CallOptions options{.async = async};
    for (const ReduceOp op :
         {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        reduce_all(group, device, dtype, op, options);
      }
      if (op == ReduceOp::Avg) continue;
      for (const at::ScalarType dtype : {at::kInt, at::kLong, at::kChar, at::kByte}) {
        reduce_all(group, device, dtype, op, options);
      }
    }
    reduce_all(group, device, at::kBool, ReduceOp::Sum, options);
    reduce_all(group, device, at::kBool, ReduceOp::Product, options);
  });
  REQUIRE(races_text() == "");
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE("a scale multiplies the result, whatever the reduction", "[nccl]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
      at::Tensor tensor = at::full({8}, group.rank() + 1.0).to(device);
      group.all_reduce(tensor, {.op = op, .scale = 0.5}, {.async = true})->wait();
      const double expected = op == ReduceOp::Sum ? 1.5 : op == ReduceOp::Avg ? 0.75 : 1.0;
      expect(first(tensor.cpu()) == expected, std::string(name(op)));
    }
  });
  REQUIRE(races_text() == "");
  REQUIRE(mock_nccl::live().reductions == 0);
}

TEST_CASE("tensors that are not contiguous, complex ones and lists", "[nccl]") {
  const auto async = GENERATE(false, true);
  run_device_group(kRanks, [&](ProcessGroup& group, c10::Device device) {
    const CallOptions options{.async = async};
    const int rank = group.rank();
    const at::Tensor input = input_of(rank, {4, 6}, at::kFloat);
    at::Tensor turned = input.to(device).t();
    group.all_reduce(turned, {}, options)->wait();
    expect_equal(turned.cpu(), reduced(kRanks, {4, 6}, at::kFloat, ReduceOp::Sum).t(), "turned");

    at::Tensor complex = input.to(at::kComplexFloat).to(device);
    group.all_reduce(complex, {}, options)->wait();
    expect_equal(at::real(complex).cpu().contiguous(),
                 reduced(kRanks, {4, 6}, at::kFloat, ReduceOp::Sum), "complex");

    std::vector<at::Tensor> list = {input.to(device), input.to(device).mul(2)};
    group.all_reduce_coalesced(list, {}, options)->wait();
    expect_equal(list[1].cpu(), reduced(kRanks, {4, 6}, at::kFloat, ReduceOp::Sum).mul(2), "list");
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("gathers, scatters and exchanges", "[nccl]") {
  const auto async = GENERATE(false, true);
  run_device_group(kRanks, [&](ProcessGroup& group, c10::Device device) {
    const CallOptions options{.async = async};
    const int rank = group.rank();
    const at::Tensor own = input_of(rank, {2, 3}, at::kShort).to(device);
    at::Tensor all = at::empty({kRanks, 2, 3}, own.options());
    group.all_gather_into(all, own, options)->wait();
    expect_equal(all.cpu(), all_inputs(kRanks, {2, 3}, at::kShort).to(at::kShort), "gathered");

    // Uneven: rank r has r + 1 elements.
    std::vector<at::Tensor> parts;
    for (int r = 0; r < kRanks; ++r) parts.push_back(at::empty({r + 1}, own.options()));
    group.all_gather(parts, input_of(rank, {rank + 1}, at::kShort).to(device), options)->wait();
    expect_equal(parts[2].cpu(), input_of(2, {3}, at::kShort), "uneven");

    at::Tensor part = at::empty({4}, at::TensorOptions().device(device));
    group.reduce_scatter_into(part, input_of(rank, {12}, at::kFloat).to(device), {}, options)
        ->wait();
    expect_equal(part.cpu(),
                 reduced(kRanks, {12}, at::kFloat, ReduceOp::Sum).narrow(0, 4 * rank, 4),
                 "reduce_scatter");

    at::Tensor mixed = at::empty({6}, part.options());
    group.all_to_all_single(mixed, input_of(rank, {6}, at::kFloat).to(device), {}, {}, options)
        ->wait();
    expect_equal(mixed.cpu().narrow(0, 2, 2), input_of(1, {6}, at::kFloat).narrow(0, 2 * rank, 2),
                 "all_to_all");

    at::Tensor told = input_of(rank, {7}, at::kFloat).to(device);
    group.broadcast(told, 2, options)->wait();
    expect_equal(told.cpu(), input_of(2, {7}, at::kFloat), "broadcast");
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("sends and receives, before and after all have met", "[nccl]") {
  // Other cases keep some on purpose.
  const int before = mock_nccl::live().communicators;
  run_device_group(kRanks, [](ProcessGroup& group, c10::Device device) {
    const int rank = group.rank();
    for (const bool have_met : {false, true}) {
      if (have_met) group.all_reduce(filled(1).to(device));
      at::Tensor message = filled(rank).to(device);
      if (rank == 0) group.send(filled(7).to(device), 2)->wait();
      if (rank == 2) {
        group.recv(message, 0)->wait();
        expect(first(message.cpu()) == 7, "received");
      }
    }
    at::Tensor from_left = filled(-1).to(device);
    const int right = (rank + 1) % kRanks;
    const int left = (rank + kRanks - 1) % kRanks;
    group
        .exchange({{Exchange::Direction::Send, filled(rank).to(device), right, 0},
                   {Exchange::Direction::Recv, from_left, left, 0}},
                  {.async = true})
        ->wait();
    expect(first(from_left.cpu()) == left, "exchanged");
  });
  REQUIRE(races_text() == "");
  REQUIRE(mock_nccl::live().communicators == before);
}

TEST_CASE("lists of blocks travel as one operation, without a copy", "[nccl]") {
  const auto async = GENERATE(false, true);
  run_device_group(kRanks, [&](ProcessGroup& group, c10::Device device) {
    const CallOptions options{.async = async};
    const int rank = group.rank();
    const std::vector<at::Tensor> own = {input_of(rank, {2, 3}, at::kFloat).to(device),
                                         input_of(rank, {5}, at::kFloat).to(device)};
    const std::vector<at::Tensor> all = {at::empty({kRanks, 2, 3}, own[0].options()),
                                         at::empty({kRanks * 5}, own[0].options())};
    group.all_gather_into_coalesced(all, own, options)->wait();
    expect_equal(all[0].cpu(), all_inputs(kRanks, {2, 3}, at::kFloat).to(at::kFloat), "first");
    expect_equal(all[1].cpu(), all_inputs(kRanks, {5}, at::kFloat).to(at::kFloat).view(-1), "last");

    const std::vector<at::Tensor> whole = {input_of(rank, {6}, at::kFloat).to(device),
                                           input_of(rank, {12}, at::kFloat).to(device)};
    const std::vector<at::Tensor> parts = {at::empty({2}, own[0].options()),
                                           at::empty({4}, own[0].options())};
    group.reduce_scatter_into_coalesced(parts, whole, {.op = ReduceOp::Sum}, options)->wait();
    for (std::size_t i = 0; i < 2; ++i) {
      const std::int64_t numel = parts[i].numel();
      expect_equal(parts[i].cpu(),
                   reduced(kRanks, {numel * kRanks}, at::kFloat, ReduceOp::Sum)
                       .narrow(0, numel * rank, numel),
                   "reduced");
    }
  });
  REQUIRE(races_text() == "");
}
