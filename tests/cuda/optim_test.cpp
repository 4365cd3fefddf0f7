// AdamW over device tensors: the bits of the host's, and nothing comes to the host.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>

#include "libddp/optim/fused_adamw.h"
#include "tests/cuda/device_fixture.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

std::vector<at::Tensor> waves(double seed, c10::Device device) {
  std::vector<at::Tensor> all;
  for (const std::int64_t numel : {33, 0, 7}) {
    all.push_back(at::sin(at::arange(numel, at::kFloat) * 0.3 + seed++).to(device));
  }
  all.push_back(all.front().clone().view({3, 11}).t());
  return all;
}

/// Parameters, moments and steps after some updates, of which one has met infinities.
std::vector<at::Tensor> updated(c10::Device device, bool amsgrad) {
  const std::vector<at::Tensor> parameters = waves(0, device);
  const AdamwState state = make_adamw_state(parameters, amsgrad);
  const at::TensorOptions numbers = at::TensorOptions().device(device);
  for (int step = 0; step < 4; ++step) {
    const at::Tensor scale = step > 1 ? at::full({}, 8.0, numbers) : at::Tensor();
    const at::Tensor found = step > 1 ? at::full({}, step == 2, numbers).to(at::kFloat) : scale;
    fused_adamw(parameters, waves(step + 1, device), state, {.lr = 0.1, .amsgrad = amsgrad}, scale,
                found);
  }
  std::vector<at::Tensor> all;
  for (const auto* list :
       {&parameters, &state.exp_avgs, &state.exp_avg_sqs, &state.max_exp_avg_sqs, &state.steps}) {
    for (const at::Tensor& tensor : *list) all.push_back(tensor.cpu().contiguous());
  }
  return all;
}

}  // namespace

TEST_CASE("AdamW on a device has the host's bits", "[adamw]") {
  const auto amsgrad = GENERATE(false, true);
  run_device_group(1, [&](ProcessGroup&, c10::Device device) {
    const std::vector<at::Tensor> wanted = updated(c10::Device(c10::kCPU), amsgrad);
    const std::vector<at::Tensor> found = updated(device, amsgrad);
    expect(found.size() == wanted.size(), "as many");
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_equal(found[i], wanted[i], "tensor " + std::to_string(i));
    }
  });
  REQUIRE(races_text() == "");
}
