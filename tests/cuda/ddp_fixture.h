#pragma once

// A small network for reducers, the same on the host and on a fake device, and what a test counts.
//
//   TrainedNet net(device);
//   const auto reducer = Reducer::create(net.parameters(), group, small_buckets());
//   step(*reducer, net, input);

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libddp/ddp/reducer.h"
#include "libddp/module/named_tensor.h"

namespace libddp::test {

/// Three linear layers with biases; the same values each time.
class TrainedNet {
 public:
  explicit TrainedNet(c10::Device device);

  const NamedTensors& parameters() const { return parameters_; }
  at::Tensor operator[](std::size_t index) const { return parameters_[index].tensor; }
  /// The layers before `num_layers`, and a loss of what they give.
  at::Tensor loss(const at::Tensor& input, int num_layers = 3) const;
  at::Tensor layer(int number, const at::Tensor& input) const;
  /// As torch::optim::SGD, with gradients that go, or are set to zero.
  void update();
  void clear(bool to_none = true);
  /// Parameters, on the host.
  std::vector<at::Tensor> values() const;
  std::vector<at::Tensor> gradients() const;

 private:
  NamedTensors parameters_;
};

/// Of about two parameters each.
ReducerOptions small_buckets();
/// This rank's input of a step.
at::Tensor batch(int rank, int step, c10::Device device);

/// Forward, backward and update.
void step(Reducer& reducer, TrainedNet& net, const at::Tensor& input, int num_layers = 3);

/// What every rank of a host group has after `train`; the same for all.
using Train = std::function<std::vector<at::Tensor>(Group group, c10::Device device)>;
std::vector<std::vector<at::Tensor>> on_host(int world_size, const Train& train);
/// The same on fake devices. Requires equal bits, and no race.
void expect_as_on_host(int world_size, const Train& train);

/// Calls of an operator by this process while it lives. `on_call` runs before each, in its thread.
class CountedCalls {
 public:
  explicit CountedCalls(std::string name, std::function<void()> on_call = nullptr);
  ~CountedCalls();
  CountedCalls(const CountedCalls&) = delete;
  CountedCalls& operator=(const CountedCalls&) = delete;
  int count() const;

 private:
  std::uint64_t handle_;
};

}  // namespace libddp::test
