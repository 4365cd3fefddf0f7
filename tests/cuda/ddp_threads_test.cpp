// A model on a device with outputs on the device and on the CPU: autograd reaches them in two
// threads at once.

#include <torch/csrc/autograd/autograd.h>

#include <ATen/TensorOperators.h>

#include <cstdint>
#include <vector>

#include "tests/cuda/ddp_fixture.h"
#include "tests/cuda/device_fixture.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr int kSteps = 40;

/// One output stays on the device, one has been moved to the CPU; which of them comes first
/// changes.
std::vector<at::Tensor> train(const Group& group, c10::Device device) {
  TrainedNet net(device);
  const auto reducer = Reducer::create(net.parameters(), group, small_buckets());
  for (int step = 0; step < kSteps; ++step) {
    net.clear();
    const at::Tensor x = batch(group->rank(), step, device);
    const at::Tensor there = net.loss(x);
    const at::Tensor here = (net.loss(x, 2) * 0.5).cpu();
    if (!device.is_cpu()) let_meet(there, here);
    reducer->prepare_for_backward({there, here});
    const bool is_here_first = step % 2 == 0;
    torch::autograd::backward(is_here_first ? std::vector<at::Tensor>{here, there}
                                            : std::vector<at::Tensor>{there, here});
    expect(reducer->timeline().passes().back().number == static_cast<std::uint64_t>(step) + 1,
           "a pass begins once");
    net.update();
  }
  return net.values();
}

}  // namespace

TEST_CASE("outputs on the device and on the CPU are of one pass", "[ddp][threads]") {
  expect_as_on_host(2, train);
}
