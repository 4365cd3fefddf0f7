// What takes the place of averaging on a device, and models in low precision.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/delayed_gradients.h"
#include "libddp/ddp/replicated_model.h"
#include "tests/cuda/ddp_fixture.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// As torch's allreduce_hook: divides, sums, and tells by a future.
class SumHook final : public c10d::CommHookInterface {
 public:
  explicit SumHook(Group group) : group_(std::move(group)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor buffer = bucket.getBuffer();
    const at::Tensor share = buffer.div(group_->size());
    const WorkPtr work = group_->all_reduce(share, {}, {.async = true});
    const c10::Device device = buffer.device();
    std::vector<c10::Device> devices;
    if (!device.is_cpu()) devices.push_back(device);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
    if (device.is_cpu()) {
      work->wait();
      future->markCompleted(share);
      return future;
    }
    const c10::StreamGuard guard(side_stream(device));
    work->wait();
    future->markCompleted(share);
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  const Group group_;
};

}  // namespace

TEST_CASE("communication hooks with futures of a device", "[ddp][hooks]") {
  const auto kind = GENERATE(0, 1, 2);
  expect_as_on_host(2, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer = Reducer::create(net.parameters(), group, small_buckets());
    reducer->register_comm_hook(kind == 0   ? std::make_shared<SumHook>(group)
                                : kind == 1 ? compress_hook(group, at::kBFloat16)
                                            : compress_hook(group, at::kHalf));
    for (int i = 0; i < 3; ++i) {
      net.clear();
      step(*reducer, net, batch(group->rank(), i, device));
    }
    return net.values();
  });
}

TEST_CASE("a hook's pass does not make the host wait", "[ddp][hooks]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer =
        Reducer::create(net.parameters(), group.shared_from_this(), small_buckets());
    reducer->register_comm_hook(compress_hook(group.shared_from_this(), at::kHalf));
    for (int i = 0; i < 3; ++i) {
      net.clear();
      const at::Tensor input = batch(group.rank(), i, device);
      const auto before = fakegpu::num_host_waits(device.index());
      step(*reducer, net, input);
      expect(fakegpu::num_host_waits(device.index()) == before, "no waits");
    }
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("gradients that are averaged later", "[ddp][hooks]") {
  const bool as_view = GENERATE(true, false);
  expect_as_on_host(2, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const NamedTensors late = {net.parameters()[0], net.parameters()[2], net.parameters()[4]};
    const auto delayed = DelayedGradients::create({late, net[1], as_view}, group);
    std::vector<at::Tensor> found;
    for (int i = 0; i < 4; ++i) {
      if (i == 2) net.clear();
      // The first bias triggers: it takes part in every second pass.
      const at::Tensor input = batch(group->rank(), i, device);
      const at::Tensor hidden = i % 2 == 1 ? net.layer(0, input) : input.narrow(1, 0, 3);
      const at::Tensor last =
          i % 2 == 1 ? net.layer(1, hidden) : hidden.matmul(net[4].narrow(1, 0, 3).t());
      last.pow(2).sum().backward();
      for (const at::Tensor& gradient : net.gradients()) found.push_back(gradient);
    }
    return found;
  });
}

TEST_CASE("a model starts from rank 0's values and keeps buffers alike", "[ddp]") {
  run_device_group(3, [](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    {
      const c10::NoGradGuard no_grad;
      net[0].add_(group.rank());
    }
    const at::Tensor counter = at::arange(3, at::kLong).add(group.rank()).to(device);
    const at::Tensor left = at::arange(5, at::kFloat).add(group.rank());
    ReplicatedModel replica(net.parameters(), {{"counter", counter}, {"host", left}},
                            group.shared_from_this(), {});
    expect_equal(net.values()[0], TrainedNet(c10::kCPU).values()[0], "parameter");
    expect_equal(counter.cpu(), at::arange(3, at::kLong), "buffer");
    expect_equal(left, at::arange(5, at::kFloat), "buffer on the host");
    counter.add_(group.rank());
    replica.broadcast({counter}, 1);
    expect_equal(counter.cpu(), at::arange(3, at::kLong).add(1), "buffer of rank 1");
    replica.before_forward();
    const at::Tensor loss = net.loss(batch(group.rank(), 0, device));
    expect(replica.after_forward({loss}, true), "synchronises");
    loss.backward();
    net.update();
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("parameters of several devices are refused", "[ddp]") {
  run_device_group(1, [](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    NamedTensors parameters = net.parameters();
    parameters[3].tensor = TrainedNet(c10::kCPU)[3];
    const std::string message = message_of<ArgumentError>(
        [&] { ReplicatedModel(parameters, {}, group.shared_from_this(), {}); });
    expect(message.find("parameter '1.bias' is on cpu and '0.weight' on") != std::string::npos,
           message);
  });
}

TEST_CASE("native mixed precision on a device", "[ddp]") {
  const auto reduce_dtype = GENERATE(at::kFloat, at::kBFloat16);
  const int world_size = GENERATE(1, 2);
  expect_as_on_host(world_size, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    DistributedDataParallelOptions options;
    options.first_bytes = options.cap_bytes = 128;
    options.mixed_precision = {at::kBFloat16, reduce_dtype, {}};
    ReplicatedModel replica(net.parameters(), {}, group, options);
    for (int i = 0; i < 3; ++i) {
      net.clear();
      if (i == 1) {  // adds up here first
        replica.before_forward();
        const at::Tensor loss =
            net.loss(batch(group->rank(), 5, device).to(at::kBFloat16)).to(at::kFloat);
        replica.after_forward({loss}, false);
        loss.backward();
      }
      replica.before_forward();
      const at::Tensor loss = net.loss(batch(group->rank(), i, device).to(at::kBFloat16));
      replica.after_forward({loss}, true);
      loss.backward();
      expect(net[0].grad().scalar_type() == at::kFloat, "in the parameter's dtype");
      net.update();
    }
    return net.values();
  });
}
