#include "tests/cuda/ddp_fixture.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "tests/cuda/device_fixture.h"
#include "tests/support/catch.h"

namespace libddp::test {
namespace {

/// Multiples of 1/16 between -1 and 1.
at::Tensor some_values(at::IntArrayRef sizes, int seed, c10::Device device) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) numel *= size;
  const at::Tensor numbers = at::arange(numel, at::kFloat).mul(7).add(seed);
  return numbers.remainder(31).sub(15).div(16).view(sizes).to(device);
}

std::mutex counted_mutex;
std::string counted_name;
std::function<void()> counted_function;
std::atomic<int> counted{0};

std::unique_ptr<at::ObserverContext> count_call(const at::RecordFunction& function) {
  if (function.name() != counted_name) return nullptr;
  ++counted;
  if (counted_function) counted_function();
  return nullptr;
}

}  // namespace

TrainedNet::TrainedNet(c10::Device device) {
  const std::vector<std::int64_t> widths = {5, 6, 6, 4};
  for (int layer = 0; layer < 3; ++layer) {
    const std::int64_t in = widths[layer], out = widths[layer + 1];
    parameters_.push_back({fmt::format("{}.weight", layer),
                           some_values({out, in}, layer, device).set_requires_grad(true)});
    parameters_.push_back({fmt::format("{}.bias", layer),
                           some_values({out}, layer + 3, device).set_requires_grad(true)});
  }
}

at::Tensor TrainedNet::layer(int number, const at::Tensor& input) const {
  const auto index = static_cast<std::size_t>(2 * number);
  return at::tanh(at::linear(input, (*this)[index], (*this)[index + 1]));
}

at::Tensor TrainedNet::loss(const at::Tensor& input, int num_layers) const {
  at::Tensor hidden = input;
  for (int number = 0; number < num_layers; ++number) hidden = layer(number, hidden);
  return hidden.pow(2).sum();
}

void TrainedNet::update() {
  const c10::NoGradGuard no_grad;
  for (auto& [name, tensor] : parameters_) {
    if (tensor.grad().defined()) tensor.add_(tensor.grad(), -0.125);
  }
}

void TrainedNet::clear(bool to_none) {
  for (auto& [name, tensor] : parameters_) {
    if (to_none) {
      tensor.mutable_grad() = at::Tensor();
    } else if (tensor.grad().defined()) {
      tensor.mutable_grad().zero_();
    }
  }
}

std::vector<at::Tensor> TrainedNet::values() const {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : parameters_) values.push_back(tensor.detach().cpu().clone());
  return values;
}

std::vector<at::Tensor> TrainedNet::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, tensor] : parameters_) {
    gradients.push_back(tensor.grad().defined() ? tensor.grad().detach().cpu().clone()
                                                : at::Tensor());
  }
  return gradients;
}

ReducerOptions small_buckets() {
  ReducerOptions options;
  options.limits = {.first_bytes = 128, .cap_bytes = 128, .last_bytes = 128};
  return options;
}

at::Tensor batch(int rank, int step, c10::Device device) {
  return some_values({3, 5}, 5 * rank + 11 * step, device);
}

void step(Reducer& reducer, TrainedNet& net, const at::Tensor& input, int num_layers) {
  const at::Tensor loss = net.loss(input, num_layers);
  reducer.prepare_for_backward({loss});
  loss.backward();
  net.update();
}

std::vector<std::vector<at::Tensor>> on_host(int world_size, const Train& train) {
  std::vector<std::vector<at::Tensor>> results(static_cast<std::size_t>(world_size));
  run_group(world_size, [&](ProcessGroup& group) {
    results[static_cast<std::size_t>(group.rank())] = train(group.shared_from_this(), c10::kCPU);
  });
  return results;
}

void expect_as_on_host(int world_size, const Train& train) {
  const auto expected = on_host(world_size, train);
  run_device_group(world_size, [&](ProcessGroup& group, c10::Device device) {
    const std::vector<at::Tensor> found = train(group.shared_from_this(), device);
    const auto& of_rank = expected[static_cast<std::size_t>(group.rank())];
    expect(found.size() == of_rank.size(), "as many results");
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect(found[i].defined() == of_rank[i].defined(), fmt::format("result {} is there", i));
      if (found[i].defined()) expect_equal(found[i], of_rank[i], fmt::format("result {}", i));
    }
  });
  REQUIRE(races_text() == "");
}

CountedCalls::CountedCalls(std::string name, std::function<void()> on_call) {
  const std::lock_guard lock(counted_mutex);
  counted_name = std::move(name);
  counted_function = std::move(on_call);
  counted = 0;
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&count_call).scopes({at::RecordScope::FUNCTION}));
}

CountedCalls::~CountedCalls() { at::removeCallback(handle_); }

int CountedCalls::count() const { return counted.load(); }

}  // namespace libddp::test
