// Every bad argument is an ArgumentError that names group, rank, operation, argument and what to
// do, before any byte moves: a group of one rank is enough to see it.

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <limits>

#include "tests/support/catch.h"
#include "tests/support/require_parts.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;
using Direction = Exchange::Direction;

namespace {

using Call = std::function<void(ProcessGroup&)>;

/// Calls on a group of one rank; the message of the ArgumentError it must throw.
std::string refusal(const Call& call) {
  std::string text;
  run_group(1, [&](ProcessGroup& group) {
    text = message_of<ArgumentError>([&] { call(group); });
    expect(group.sequence_number() == 0, "nothing was issued");
    expect(group.failure() == nullptr, "the group is healthy");
  });
  return text;
}

void require_refusal(const Call& call, const std::vector<std::string>& parts) {
  const std::string text = refusal(call);
  require_parts(text, parts);
  require_parts(text, {"libddp[group test, rank 0/1] ", "Hint: "});
}

at::Tensor floats(at::IntArrayRef sizes) { return at::ones(sizes, at::kFloat); }

}  // namespace

TEST_CASE("tensors that cannot be moved are refused", "[validation]") {
  require_refusal([](ProcessGroup& g) { g.all_reduce(at::Tensor()); },
                  {"all_reduce: argument tensor is an undefined tensor"});
  require_refusal(
      [](ProcessGroup& g) {
        g.all_reduce(floats({2, 2}).to_sparse());
      },
      {"all_reduce: argument tensor is sparse", "to_dense()"});
  require_refusal(
      [](ProcessGroup& g) {
        g.broadcast(at::empty({2}, at::TensorOptions().device(at::kMeta)), 0);
      },
      {"broadcast: argument tensor float32 [2] is on device meta", "CPU tensors only"});
  require_refusal([](ProcessGroup& g) { g.all_reduce(at::zeros({2}, at::kUInt16)); },
                  {"all_reduce: argument tensor uint16 [2] has a dtype"});
  require_refusal([](ProcessGroup& g) { g.broadcast(at::zeros({2}, at::kFloat8_e4m3fn), 0); },
                  {"broadcast: argument tensor float8_e4m3fn [2] has a dtype", "uint8"});
}

TEST_CASE("elements that share memory get one value", "[validation]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor output = at::zeros({4, 3});
    group.all_gather_into(output, floats({1, 3}).expand({2, 3}));
    expect_equal(output, floats({4, 3}), "expanded input");
    const at::Tensor row = floats({1, 3});
    group.all_reduce(row.expand({2, 3}));
    expect_equal(row, 2 * floats({1, 3}), "expanded in front");
    const at::Tensor both = at::complex(floats({1, 1}), floats({1, 1}));
    group.all_reduce(both.expand({3, 2}), {}, {.async = true})->wait();
    expect_equal(both, 2 * at::complex(floats({1, 1}), floats({1, 1})), "expanded twice, complex");
    const at::Tensor nan = at::full({1}, std::numeric_limits<float>::quiet_NaN());
    group.broadcast(nan.expand({4}), 0);
    expect(nan.isnan().item<bool>(), "a value that equals no other");
  });
}

TEST_CASE("elements that share memory cannot get several values", "[validation]") {
  run_group(2, [](ProcessGroup& group) {
    const at::Tensor column = at::zeros({3, 1});
    const bool is_expanded = group.rank() == 1;
    const at::Tensor tensor = is_expanded ? column.expand({3, 2}) : at::arange(6.f).view({3, 2});
    for (const bool async : {false, true}) {
      const auto call = [&] { group.broadcast(tensor, 0, {.async = async})->wait(); };
      if (!is_expanded) {
        call();
        continue;
      }
      const std::string text = message_of<ArgumentError>(call);
      expect(contains(text,
                      "rank 1/2] broadcast: argument tensor float32 [3, 2] has elements that share "
                      "memory (strides [1, 0])"),
             text);
    }
    at::Tensor after = at::ones({1});
    group.all_reduce(after);
    expect(after.item<float>() == 2, "the group goes on");
  });
}

TEST_CASE("reductions that a dtype does not have are refused", "[validation]") {
  const auto reduce = [](at::Tensor tensor, ReduceOptions options) {
    return [=](ProcessGroup& g) { g.all_reduce(tensor, options); };
  };
  require_refusal(reduce(at::zeros({2}, at::kInt), {.op = ReduceOp::Avg}),
                  {"op AVG is not defined for tensor int32 [2]"});
  require_refusal(reduce(floats({2}), {.op = ReduceOp::Bxor}), {"op BXOR is not defined for"});
  require_refusal(reduce(at::complex(floats({2}), floats({2})), {.op = ReduceOp::Max}),
                  {"op MAX is not defined for tensor complex64 [2]"});
  require_refusal(reduce(at::complex(floats({2}), floats({2})), {.op = ReduceOp::Product}),
                  {"op PRODUCT is not defined for tensor complex64 [2]"});
  require_refusal(reduce(at::zeros({2}, at::kLong), {.scale = 0.5}),
                  {"scale=0.5 is not defined for tensor int64 [2]"});
}

TEST_CASE("ranks, roots and tags out of range are refused", "[validation]") {
  require_refusal([](ProcessGroup& g) { g.broadcast(floats({2}), 1); },
                  {"broadcast: root=1 is not a rank of this group", "ranks are 0 to 0"});
  require_refusal([](ProcessGroup& g) { g.reduce(floats({2}), -1); }, {"reduce: root=-1"});
  require_refusal([](ProcessGroup& g) { g.gather({}, floats({2}), 3); }, {"gather: root=3"});
  require_refusal([](ProcessGroup& g) { g.send(floats({2}), 7); }, {"send: target=7"});
  require_refusal([](ProcessGroup& g) { g.send(floats({2}), 0); },
                  {"send: target=0 is this rank itself", "exchange"});
  require_refusal([](ProcessGroup& g) { g.recv(floats({2}), 0); },
                  {"recv: source=0 is this rank itself"});
  require_refusal([](ProcessGroup& g) { g.recv(floats({2}), std::nullopt); },
                  {"recv: there is no other rank"});
  require_refusal(
      [](ProcessGroup& g) {
        g.exchange({{Direction::Send, floats({2}), 0, -4}, {Direction::Recv, floats({2}), 0, -4}});
      },
      {"exchange: tag=-4 is negative"});
  require_refusal([](ProcessGroup& g) { g.exchange({}); }, {"exchange: parts is empty"});
  require_refusal(
      [](ProcessGroup& g) {
        g.exchange({{Direction::Send, floats({2}), 0, 1}});
      },
      {"a send to this rank itself (tag 1) has no receive"});
  require_refusal(
      [](ProcessGroup& g) {
        g.exchange({{Direction::Recv, floats({2}), 0, 1}});
      },
      {"a receive from this rank itself (tag 1) has no send"});
}

TEST_CASE("sizes that do not fit are refused", "[validation]") {
  require_refusal([](ProcessGroup& g) { g.all_gather_into(floats({3}), floats({2})); },
                  {"all_gather_into: output float32 [3] must hold 1 blocks of input float32 [2], "
                   "that is 2 elements, but holds 3",
                   "[world_size * d0, ...]"});
  require_refusal([](ProcessGroup& g) { g.reduce_scatter_into(floats({2}), floats({5})); },
                  {"reduce_scatter_into: input float32 [5] must hold"});
  require_refusal(
      [](ProcessGroup& g) { g.all_gather_into(at::zeros({2}, at::kLong), floats({2})); },
      {"output int64 [2] and input float32 [2] differ in dtype"});
  require_refusal([](ProcessGroup& g) { g.all_gather({floats({3})}, floats({2})); },
                  {"outputs[rank] float32 [3] and input float32 [2] differ in size"});
  require_refusal([](ProcessGroup& g) { g.gather({floats({3})}, floats({2}), 0); },
                  {"gather: outputs float32 [3] and input float32 [2] differ in size"});
  require_refusal([](ProcessGroup& g) { g.reduce_scatter(floats({3}), {floats({2})}); },
                  {"reduce_scatter: output float32 [3] and inputs[rank] float32 [2]"});
  require_refusal([](ProcessGroup& g) { g.all_to_all_single(floats({4}), floats({4}), {3}, {4}); },
                  {"all_to_all_single: split sizes [3] do not fit output float32 [4] and 1 ranks"});
  require_refusal(
      [](ProcessGroup& g) {
        g.all_to_all_single(floats({4}), floats({4}), {5, -1}, {4});
      },
      {"split sizes [5, -1] do not fit"});
}

TEST_CASE("lists of the wrong length are refused", "[validation]") {
  require_refusal([](ProcessGroup& g) { g.all_gather({}, floats({2})); },
                  {"all_gather: outputs holds 0 tensors, but the group has 1 ranks"});
  require_refusal([](ProcessGroup& g) { g.scatter(floats({2}), {}, 0); },
                  {"scatter: inputs holds 0 tensors"});
  require_refusal(
      [](ProcessGroup& g) {
        g.all_to_all({floats({1})}, {floats({1}), floats({1})});
      },
      {"all_to_all: inputs holds 2 tensors"});
  require_refusal([](ProcessGroup& g) { g.all_reduce_coalesced({}); },
                  {"all_reduce_coalesced: tensors is empty"});
  require_refusal(
      [](ProcessGroup& g) {
        g.all_reduce_coalesced({floats({1}), at::zeros({1}, at::kLong)});
      },
      {"differ in dtype"});
}

TEST_CASE("overlap of input and output is refused", "[validation]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor whole = at::zeros({8});
    const std::string text =
        message_of<ArgumentError>([&] { group.all_gather_into(whole, whole.narrow(0, 1, 4)); });
    expect(contains(text, "input float32 [4] overlaps output float32 [8]"), text);
    expect(contains(text, "rank " + std::to_string(group.rank()) + "/2]"), text);
  });
}

TEST_CASE("lists on a rank that is not the root are refused", "[validation]") {
  run_group(2, [](ProcessGroup& group) {
    const int root = 1 - group.rank();
    const std::string text = message_of<ArgumentError>([&] {
      group.gather({floats({2}), floats({2})}, floats({2}), root);
    });
    expect(contains(text, "outputs holds 2 tensors on a rank that is not the root"), text);
  });
}

TEST_CASE("timeouts must be positive", "[validation]") {
  const std::chrono::milliseconds zero{0};
  require_refusal([=](ProcessGroup& g) { g.barrier({.timeout = zero}); },
                  {"barrier: timeout of 0 ms"});
  require_refusal([=](ProcessGroup& g) { g.set_timeout(zero); }, {"set_timeout: timeout of 0 ms"});
  run_group(1, [](ProcessGroup& group) {
    group.set_timeout(std::chrono::seconds(3));
    expect(group.timeout() == std::chrono::seconds(3), "set");
  });
}

TEST_CASE("a group is not made from contradictory options", "[validation]") {
  const auto refused = [](ProcessGroup::Options options, bool with_store = true) {
    c10::intrusive_ptr<c10d::Store> store;
    if (with_store) store = c10::make_intrusive<c10d::HashStore>();
    return message_of<ArgumentError>([&] { ProcessGroup::create(store, options); });
  };
  require_parts(refused({.rank = 2, .world_size = 2}), {"rank=2 is not a rank", "0 to 1"});
  require_parts(refused({.rank = 0, .world_size = 0}), {"world_size=0"});
  require_parts(refused({.name = ""}), {"name is empty"});
  require_parts(refused({.timeout = std::chrono::seconds(-1)}), {"timeout of -1000 ms"});
  require_parts(refused({.rank = 0, .world_size = 1, .global_ranks = {1, 2}}),
                {"global_ranks [1, 2]"});
  require_parts(refused({}, false), {"store is null"});
}

TEST_CASE("split checks its ranks", "[validation]") {
  require_refusal([](ProcessGroup& g) { g.split({}, "sub"); }, {"split: ranks is empty"});
  require_refusal([](ProcessGroup& g) { g.split({0, 0}, "sub"); }, {"holds a rank twice"});
  require_refusal([](ProcessGroup& g) { g.split({0, 1}, "sub"); }, {"ranks=1 is not a rank"});
  require_refusal([](ProcessGroup& g) { g.allocate({2, -1}); }, {"allocate: size [2, -1]"});
}

TEST_CASE("a group that was shut down says so", "[validation]") {
  run_group(1, [](ProcessGroup& group) {
    group.shutdown();
    const std::string text = message_of<StateError>([&] { group.barrier(); });
    expect(contains(text, "barrier: the group has been shut down"), text);
    group.shutdown();  // again: nothing
  });
}
