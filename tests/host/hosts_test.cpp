// Groups over several hosts: the hosts are only names, the network is this machine's own.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/require_parts.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

namespace {

const std::vector<std::vector<int>> kHosts{{0, 0, 1, 1}, {0, 1, 2}, {0, 0, 1}, {0, 1, 0, 1}};

void check_all_reduce(ProcessGroup& group, at::ScalarType dtype, ReduceOp op) {
  for (const std::int64_t numel : {1, 777, 20000}) {
    at::Tensor tensor = input_of(group.rank(), {numel}, dtype);
    group.all_reduce(tensor, {.op = op});
    expect_equal(tensor, reduced(group.size(), {numel}, dtype, op), "all_reduce");
  }
}

void check_gathers(ProcessGroup& group, std::int64_t numel) {
  const at::Tensor own = input_of(group.rank(), {numel}, at::kFloat);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (int rank = 0; rank < group.size(); ++rank) {
    inputs.push_back(input_of(rank, {numel}, at::kFloat));
    outputs.push_back(at::zeros({numel}));
  }
  const at::Tensor all = at::cat(inputs);
  at::Tensor gathered = at::zeros({numel * group.size()});
  group.all_gather_into(gathered, own);
  expect_equal(gathered, all, "all_gather_into");

  at::Tensor scattered = at::zeros({numel});
  group.scatter(scattered, group.rank() == 1 ? inputs : std::vector<at::Tensor>{}, 1);
  expect_equal(scattered, own, "scatter");
  group.gather(group.rank() == 2 ? outputs : std::vector<at::Tensor>{}, own, 2);
  if (group.rank() == 2) expect_equal(at::cat(outputs), all, "gather");

  std::vector<at::Tensor> to_all(outputs.size(), own);
  group.all_to_all(outputs, to_all);
  expect_equal(at::cat(outputs), all, "all_to_all");

  at::Tensor block = at::zeros({numel});
  group.reduce_scatter_into(block, all);
  expect_equal(block, own.mul(group.size()), "reduce_scatter_into");

  at::Tensor sent = group.rank() == 2 ? own.clone() : at::zeros({numel});
  group.broadcast(sent, 2);
  expect_equal(sent, inputs[2], "broadcast");
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

using Store = c10::intrusive_ptr<c10d::Store>;

ProcessGroup::Options on_host_of_its_own(int rank, LinkOptions links, int world_size = 2) {
  ProcessGroup::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.timeout = 60s;
  options.host_identity = "host " + std::to_string(rank);
  options.links = links;
  return options;
}

/// Whether large sums of `group` are rounded on their way.
bool rounds(ProcessGroup& group) {
  constexpr float kNoBFloat16 = 1.001f;
  at::Tensor sum = filled(kNoBFloat16, 20000);
  group.all_reduce(sum);
  const float exact = kNoBFloat16 * static_cast<float>(group.size());
  const auto error = std::abs(static_cast<float>(first(sum)) - exact);
  expect(sum.eq(first(sum)).all().item<bool>(), "all elements are alike");
  expect(error <= exact / 128, "within the bounds of bf16");
  return error > 0;
}

/// What each rank of a group that cannot be made throws.
std::vector<std::string> refusals(const std::function<ProcessGroup::Options(int)>& options,
                                  int world_size = 2) {
  Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> messages(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](int rank) {
    messages[static_cast<std::size_t>(rank)] =
        message_of<Error>([&] { ProcessGroup::create(store, options(rank)); });
  });
  return messages;
}

}  // namespace

TEST_CASE("Groups over several hosts: every dtype and op") {
  for (const auto& hosts : kHosts) {
    run_group_on_hosts(hosts, [](ProcessGroup& group) {
      expect(group.backend_name() == "hosts", group.backend_name());
      for (const at::ScalarType dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool}) {
        for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max}) {
          check_all_reduce(group, dtype, op);
        }
      }
      check_all_reduce(group, at::kLong, ReduceOp::Bxor);
      check_all_reduce(group, at::kFloat, ReduceOp::Avg);
    });
  }
}

TEST_CASE("Groups over several hosts: operations that move blocks") {
  for (const auto& hosts : kHosts) {
    run_group_on_hosts(hosts, [](ProcessGroup& group) {
      for (const std::int64_t numel : {3, 1500, 300000}) check_gathers(group, numel);
      group.barrier();
    });
  }
}

TEST_CASE("Groups over several hosts: messages") {
  run_group_on_hosts({0, 0, 1}, [](ProcessGroup& group) {
    // A ring in both directions, with several sizes in flight.
    const int next = (group.rank() + 1) % 3;
    const int before = (group.rank() + 2) % 3;
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> received;
    for (const std::int64_t numel : {1, 5000, 500000}) {
      const int tag = static_cast<int>(numel % 7);
      received.push_back(at::zeros({numel}));
      works.push_back(group.recv(received.back(), before, tag, {.async = true}));
      works.push_back(group.send(filled(group.rank(), numel), next, tag, {.async = true}));
    }
    for (const WorkPtr& work : works) work->wait();
    for (const at::Tensor& tensor : received) {
      expect_equal(tensor, filled(before, tensor.numel()), "from the rank before");
    }
    // Whoever comes first.
    if (group.rank() != 0) {
      group.send(filled(group.rank()), 0, 9);
      return;
    }
    for (int i = 0; i < 2; ++i) {
      at::Tensor any = at::zeros({8});
      const WorkPtr work = group.recv(any, std::nullopt, 9);
      expect_equal(any, filled(work->source_rank()), "from the rank that it names");
    }
  });
}

TEST_CASE("Groups over several hosts: asynchronous collectives beside messages") {
  run_group_on_hosts({0, 1, 1}, [](ProcessGroup& group) {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> tensors;
    at::Tensor ball = filled(group.rank(), 100000);
    if (group.rank() == 0) works.push_back(group.send(ball, 2, 0, {.async = true}));
    if (group.rank() == 2) works.push_back(group.recv(ball, 0, 0, {.async = true}));
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(filled(group.rank() + i, 1 + i * 2000));
      works.push_back(group.all_reduce(tensors.back(), {}, {.async = true}));
    }
    for (const WorkPtr& work : works) work->wait();
    for (int i = 0; i < 20; ++i) {
      expect_equal(tensors[i], filled(3 + 3 * i, 1 + i * 2000), "the sum");
    }
    if (group.rank() == 2) expect_equal(ball, filled(0, 100000), "the ball");
  });
}

TEST_CASE("Groups over several hosts: a part of the ranks") {
  run_group_on_hosts({0, 0, 1, 1}, [](ProcessGroup& group) {
    const Group across = group.split({1, 2}, "across");
    const Group here = group.split({2, 3}, "here");
    if (across) {
      expect(across->backend_name() == "hosts", "two hosts");
      at::Tensor tensor = filled(1);
      across->all_reduce(tensor);
      expect(first(tensor) == 2, "two ranks");
      across->shutdown();
    }
    if (here) {
      expect(here->backend_name() == "host", "one host");
      here->barrier();
      here->shutdown();
    }
  });
}

TEST_CASE("Groups over several hosts: different calls") {
  for (const auto& hosts : kHosts) {
    run_group_on_hosts(hosts, [](ProcessGroup& group) {
      at::Tensor tensor = filled(1, group.rank() == group.size() - 1 ? 16 : 8);
      const std::string text = error_of([&] { group.all_reduce(tensor); });
      expect(has(text, "the ranks called different collectives"), text);
      expect(has(text, "float32 [8]") && has(text, "float32 [16]"), text);
      expect(has(error_of([&] { group.barrier(); }), "different collectives"), "it stays");
    });
  }
}

TEST_CASE("Groups over several hosts: a rank that leaves without a word") {
  for (const auto& hosts : kHosts) {
    const int last = static_cast<int>(hosts.size()) - 1;
    const std::string culprit = "rank " + std::to_string(last) + " (pid ";
    std::atomic<int> num_past{0};
    auto store_error = error_of([&] {
      run_group_on_hosts(hosts, [&](ProcessGroup& group) {
        group.barrier();
        // Else the loss may reach a rank that has not come out of the first barrier yet.
        ++num_past;
        if (group.rank() == last) {
          wait_until([&] { return num_past > last; });
          throw Error("out of luck");
        }
        const std::string text = error_of([&] { group.barrier(); });
        expect(has(text, culprit), text);
      });
    });
    expect(store_error == "out of luck", store_error);
  }
}

TEST_CASE("Groups over several hosts: a rank that has left is named with its last collective") {
  for (const int num_calls : {0, 3}) {
    run_group_on_hosts({0, 1}, [num_calls](ProcessGroup& group) {
      for (int call = 0; call < num_calls; ++call) group.barrier();
      if (group.rank() == 1) return;  // shuts down in order
      const std::string text = error_of([&] { group.barrier(); });
      const std::string when =
          num_calls == 0 ? " before its first collective." : " after its collective #3.";
      expect(has(text, "rank 1 (pid ") && has(text, "has left the group") && has(text, when), text);
    });
  }
}

TEST_CASE("Groups over several hosts: abort reaches all") {
  run_group_on_hosts({0, 0, 1, 1}, [](ProcessGroup& group) {
    if (group.rank() == 3) {
      std::this_thread::sleep_for(50ms);
      group.abort("enough");
      return;
    }
    const std::string text = error_of([&] { group.barrier(); });
    expect(has(text, "rank 3 (pid ") && has(text, "aborted") && has(text, "enough"), text);
  });
}

TEST_CASE("Groups over several hosts: the missing rank is named on every host") {
  run_group_on_hosts({0, 0, 1, 1}, [](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 3) return std::this_thread::sleep_for(2s);
    at::Tensor tensor = filled(1);
    const std::string text = error_of(
        [&] { group.all_reduce(tensor, {}, {.timeout = std::chrono::milliseconds(500)}); });
    expect(has(text, "timed out after") && has(text, "waiting for rank 3 (pid "), text);
  });
}

TEST_CASE("each group chooses what its sums travel as", "[links]") {
  Store store = c10::make_intrusive<c10d::HashStore>();
  ::unsetenv("LIBDDP_WIRE_DTYPE");
  run_ranks(2, [&](int rank) {
    const LinkOptions narrow{.sockets_per_link = 2, .wire_dtype = at::kBFloat16};
    const Group one = ProcessGroup::create(store, on_host_of_its_own(rank, narrow));
    ProcessGroup::Options plain = on_host_of_its_own(rank, {.wire_dtype = at::kFloat});
    plain.name = "plain";
    const Group other = ProcessGroup::create(store, plain);
    ProcessGroup::Options unsaid = on_host_of_its_own(rank, {});
    unsaid.name = "unsaid";
    const Group third = ProcessGroup::create(store, unsaid);
    expect(rounds(*one), "bf16 was chosen");
    expect(!rounds(*other), "float32 was chosen");
    expect(!rounds(*third), "nothing was chosen");
    const Group part = one->split({1, 0}, "part");
    expect(rounds(*part), "a part does as the whole");
    for (const Group& group : {part, third, other, one}) group->shutdown();
  });
}

TEST_CASE("choices that differ between ranks are named, both", "[links]") {
  const auto dtypes = refusals([](int rank) {
    LinkOptions links;
    if (rank == 1) links.wire_dtype = at::kBFloat16;
    return on_host_of_its_own(rank, links);
  });
  for (const std::string& message : dtypes) {
    require_parts(message, {"rank 0 (pid ", "sockets_per_link=1 wire_dtype=float32", "rank 1 (pid ",
                            "sockets_per_link=1 wire_dtype=bfloat16", "the same settings"});
  }
  const auto sockets =
      refusals([](int rank) { return on_host_of_its_own(rank, {.sockets_per_link = rank + 1}); });
  for (const std::string& message : sockets) {
    require_parts(message, {"sockets_per_link=1 ", "sockets_per_link=2 "});
  }
}

TEST_CASE("a rank whose choice cannot be tells the others", "[links]") {
  const auto messages = refusals(
      [](int rank) {
        LinkOptions links;
        if (rank == 2) links.wire_dtype = at::kHalf;
        return on_host_of_its_own(rank, links, 3);
      },
      3);
  require_parts(messages[2], {"wire_dtype=float16 is neither float32 nor bfloat16. Hint: "});
  for (const int rank : {0, 1}) {
    require_parts(messages[static_cast<std::size_t>(rank)],
                  {"bootstrap: rank 2 (pid ", "could not take part: ",
                   "wire_dtype=float16 is neither float32 nor bfloat16. Hint: "});
  }
  const auto first = refusals(
      [](int rank) { return on_host_of_its_own(rank, {.sockets_per_link = rank == 0 ? 9 : 1}); });
  require_parts(first[0], {"sockets_per_link=9 is not an integer from 1 to 8"});
  require_parts(first[1], {"rank 0 (pid ", "sockets_per_link=9 is not an integer from 1 to 8"});
  const auto odd = refusals(
      [](int rank) { return on_host_of_its_own(rank, {.wire_dtype = at::kComplexFloat}); });
  require_parts(odd[0], {"wire_dtype=", "is neither float32 nor bfloat16"});
}
