// Groups over several hosts: the hosts are only names, the network is this machine's own.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

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
    auto store_error = error_of([&] {
      run_group_on_hosts(hosts, [&](ProcessGroup& group) {
        group.barrier();
        if (group.rank() == last) throw Error("out of luck");
        const std::string text = error_of([&] { group.barrier(); });
        expect(has(text, culprit), text);
      });
    });
    expect(store_error == "out of luck", store_error);
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
