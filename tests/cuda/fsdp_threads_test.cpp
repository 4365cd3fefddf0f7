// A sharded model on a device with outputs on the device and on the CPU: autograd reaches it in two
// threads at once.

#include <torch/csrc/autograd/autograd.h>

#include <ATen/TensorOperators.h>

#include <vector>

#include "libddp/base/error.h"
#include "tests/cuda/device_fixture.h"
#include "tests/cuda/sharded_net.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

using Tensors = std::vector<at::Tensor>;

/// One output stays on the device, one has been moved to the CPU; which of them comes first
/// changes.
void run_in_two_threads(ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
  at::Tensor here;
  net.more_outputs = [&](int layer, const at::Tensor& result) {
    if (layer >= 0) return Tensors{};
    here = net.parameters()[0].pow(2).mean().cpu();
    if (!device.is_cpu()) let_meet(result, here);
    return Tensors{here};
  };
  const at::Tensor there = mean_square(net.forward(batch_at(group.rank(), step).to(device)));
  torch::autograd::backward(step % 2 == 0 ? Tensors{here, there} : Tensors{there, here});
}

}  // namespace

TEST_CASE("outputs on the device and on the CPU are of one pass of units", "[fsdp][threads]") {
  Training training;
  training.pass = run_in_two_threads;
  training.num_steps = 20;
  require_host_bits(2, training);
}

TEST_CASE("an inner unit's output on the CPU is refused, and the model goes on",
          "[fsdp][threads]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    const at::Tensor x = batch_at(group.rank(), step).to(device);
    net.more_outputs = [](int layer, const at::Tensor& result) {
      return layer == 1 ? Tensors{result.sum().cpu()} : Tensors{};
    };
    if (!device.is_cpu()) {
      const std::string text = message_of<ArgumentError>([&] { net.forward(x); });
      expect(contains(text, "unit 'layer.1' computes on fakegpu:"), text);
      expect(contains(text, "has an output on the CPU that needs a gradient"), text);
      expect(contains(text, "behind the outermost wrapped module"), text);
    }
    // Numbers that need no gradient may be anywhere.
    net.more_outputs = [](int, const at::Tensor& result) {
      return Tensors{result.detach().sum().cpu()};
    };
    mean_square(net.forward(x)).backward();
  };
  require_host_bits(2, training);
}
