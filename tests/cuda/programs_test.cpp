// Random programs of collectives on several streams: each tensor belongs to a stream, on which it
// is changed, sent and waited for; everything else is drawn. The results are those of the same
// program on the host, and the race checker finds nothing.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr int kTensors = 5;
constexpr int kSteps = 60;
constexpr std::int64_t kNumel = 12;

/// One step of a program, the same on all ranks.
struct Step {
  enum class Kind { Change, AllReduce, Broadcast, Gather, Scatter, Exchange, Replace, Wait };

  Kind kind;
  int tensor;
  int root;
  bool async;
  ReduceOp op;
};

std::vector<Step> draw_program(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
  std::vector<Step> steps;
  for (int i = 0; i < kSteps; ++i) {
    steps.push_back({static_cast<Step::Kind>(below(8)), below(kTensors), below(kRanks),
                     below(3) != 0, below(2) == 0 ? ReduceOp::Sum : ReduceOp::Max});
  }
  return steps;
}

/// Runs programs with tensors on `device`, each on a stream of its own or shared.
class Machine {
 public:
  Machine(ProcessGroup& group, c10::Device device) : group_(group), device_(device) {
    for (int i = 0; i < kTensors; ++i) {
      // Two tensors share the default stream.
      if (!device.is_cpu() && i >= 2) streams_.push_back(side_stream(device));
      if (!device.is_cpu() && i < 2) streams_.push_back(fakegpu::current_stream(device.index()));
      run_on(i, [&] { tensors_.push_back(fresh(i)); });
    }
    works_.resize(kTensors);
  }

  void run(const std::vector<Step>& program) {
    for (const Step& step : program) run_on(step.tensor, [&] { run(step); });
  }

  std::vector<at::Tensor> results() {
    std::vector<at::Tensor> all;
    for (int i = 0; i < kTensors; ++i) {
      run_on(i, [&] {
        settle(i);
        // Memory that came back too early is found where its stream allocates again.
        const at::Tensor next = fresh(i);
        all.push_back(tensors_[i].cpu());
      });
    }
    return all;
  }

 private:
  at::Tensor fresh(int value) const {
    return at::full({kNumel}, 1.0 + value + group_.rank(), at::TensorOptions().device(device_));
  }

  template <typename F>
  void run_on(int tensor, const F& f) {
    if (device_.is_cpu()) return f();
    const c10::StreamGuard guard(streams_[tensor]);
    f();
  }

  void settle(int tensor) {
    if (works_[tensor]) works_[tensor]->wait();
    works_[tensor] = nullptr;
  }

  void run(const Step& step) {
    at::Tensor& tensor = tensors_[step.tensor];
    if (step.kind == Step::Kind::Wait) return settle(step.tensor);
    if (step.kind == Step::Kind::Replace) {
      // Its work goes on, with memory that nobody holds any more.
      tensor = fresh(step.root);
      works_[step.tensor] = nullptr;
      return;
    }
    // The group's stream has its own order: asynchronous calls may follow each other.
    const bool follows =
        step.async && step.kind != Step::Kind::Change && step.kind != Step::Kind::Scatter;
    if (!follows) settle(step.tensor);
    if (step.kind == Step::Kind::Change) {
      tensor.remainder_(7).add_(group_.rank() + 1);
      return;
    }
    works_[step.tensor] = send(step, tensor);
    if (!step.async) settle(step.tensor);
  }

  WorkPtr send(const Step& step, at::Tensor& tensor) {
    const CallOptions options{.async = step.async};
    const at::Tensor before = tensor;
    switch (step.kind) {
      case Step::Kind::AllReduce:
        return group_.all_reduce(tensor, {.op = step.op}, options);
      case Step::Kind::Broadcast:
        return group_.broadcast(tensor, step.root, options);
      case Step::Kind::Gather: {
        // The part of another rank takes the tensor's place; the rest is let go.
        at::Tensor all = at::empty({kRanks * kNumel}, tensor.options());
        WorkPtr work = group_.all_gather_into(all, before, options);
        tensor = all.narrow(0, step.root * kNumel, kNumel);
        return work;
      }
      case Step::Kind::Scatter: {
        const at::Tensor input = tensor.repeat({kRanks});
        tensor = at::empty({kNumel}, tensor.options());
        return group_.reduce_scatter_into(tensor, input, {.op = step.op}, options);
      }
      default: {
        const int next = (group_.rank() + 1) % kRanks;
        const int last = (group_.rank() + kRanks - 1) % kRanks;
        tensor = at::empty({kNumel}, tensor.options());
        return group_.exchange({{Exchange::Direction::Send, before, next, step.tensor},
                                {Exchange::Direction::Recv, tensor, last, step.tensor}},
                               options);
      }
    }
  }

  ProcessGroup& group_;
  const c10::Device device_;
  std::vector<c10::Stream> streams_;
  std::vector<at::Tensor> tensors_;
  std::vector<WorkPtr> works_;
};

void run_program(std::uint64_t seed) {
  const std::vector<Step> program = draw_program(seed);
  run_device_group(kRanks, [&](ProcessGroup& group, c10::Device device) {
    // All ranks must have met before they exchange in pairs of a ring.
    group.connect(device);
    Machine on_device(group, device);
    on_device.run(program);
    const std::vector<at::Tensor> results = on_device.results();
    std::vector<Step> in_order = program;
    for (Step& step : in_order) step.async = false;
    Machine on_host(group, c10::kCPU);
    on_host.run(in_order);
    const std::vector<at::Tensor> expected = on_host.results();
    for (int i = 0; i < kTensors; ++i) {
      expect_equal(results[i], expected[i], "tensor " + std::to_string(i));
    }
  });
}

}  // namespace

TEST_CASE("random programs compute what they compute on the host, without a race",
          "[nccl][programs]") {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    INFO("seed " << seed);
    run_program(seed);
    REQUIRE(races_text() == "");
  }
}

TEST_CASE("most waits of a random program cannot be left out", "[nccl][programs][drops_waits]") {
  // Some can: a later wait makes up for them before anything is used, and a broadcast's root only
  // reads. streams_test.cpp has a program where each is needed.
  std::vector<Step> program = draw_program(3);
  for (Step& step : program) {
    if (step.kind == Step::Kind::Broadcast) step.kind = Step::Kind::AllReduce;
  }
  const auto run_without = [&](std::int64_t wait) {
    run_device_group(kRanks, [&](ProcessGroup& group, c10::Device device) {
      if (group.rank() == 1) fakegpu::ignore_wait(wait, 1);
      group.connect(device);
      Machine machine(group, device);
      machine.run(program);
      machine.results();
    });
  };
  constexpr std::int64_t kNone = 0;
  run_without(kNone);
  REQUIRE(races_text() == "");
  const std::int64_t num_waits = fakegpu::num_waits(1);
  const std::vector<std::int64_t> redundant = fakegpu::redundant_waits(1);
  REQUIRE(num_waits > 40);
  int num_tried = 0;
  int num_found = 0;
  for (std::int64_t k = 1; k <= num_waits; ++k) {
    if (std::find(redundant.begin(), redundant.end(), k) != redundant.end()) continue;
    run_without(k);
    ++num_tried;
    if (races_text() != "") ++num_found;
  }
  INFO(num_found << " of " << num_tried);
  REQUIRE(num_found * 3 >= num_tried * 2);
}
