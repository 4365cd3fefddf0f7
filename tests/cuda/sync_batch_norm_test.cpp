// SyncBatchNorm over device tensors: the host's numbers, and nothing comes to the host.

#include "libddp/ddp/sync_batch_norm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/utils.h>

#include <vector>

#include "tests/cuda/device_fixture.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Output, gradients and statistics of two batches.
std::vector<at::Tensor> results_on(c10::Device device, const Group& group) {
  SyncBatchNorm norm(3, group);
  // A fake device's tensors cannot become the data of others, as Module::to wants.
  for (at::Tensor* tensor : {&norm->weight, &norm->bias}) {
    *tensor = tensor->detach().to(device).requires_grad_();
  }
  for (at::Tensor* tensor : {&norm->running_mean, &norm->running_var, &norm->num_batches_tracked}) {
    *tensor = tensor->to(device);
  }
  std::vector<at::Tensor> all;
  for (const double seed : {1.0, 2.0}) {
    const at::Tensor values = at::sin(at::arange(24, at::kFloat) * 0.3 + seed + group->rank());
    const at::Tensor input = values.view({2, 3, 4}).to(device).requires_grad_();
    const auto waits = fakegpu::num_host_waits(group->rank());
    const at::Tensor output = norm(input);
    (output * output * output).sum().backward();
    expect(fakegpu::num_host_waits(group->rank()) == waits, "no waits");
    all.insert(all.end(), {output.detach(), input.grad()});
  }
  all.insert(all.end(), {norm->weight.grad(), norm->bias.grad(), norm->running_mean,
                         norm->running_var, norm->num_batches_tracked});
  for (at::Tensor& tensor : all) tensor = tensor.cpu();
  return all;
}

}  // namespace

TEST_CASE("SyncBatchNorm on devices has the host's numbers", "[sync_batch_norm]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const Group shared = group.shared_from_this();
    const std::vector<at::Tensor> wanted = results_on(c10::Device(c10::kCPU), shared);
    const std::vector<at::Tensor> found = results_on(device, shared);
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect(at::allclose(found[i], wanted[i], 1e-6, 1e-6), "tensor " + std::to_string(i));
    }
  });
  REQUIRE(races_text() == "");
}
