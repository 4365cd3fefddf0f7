// Models on devices that go on in other groups: the bits of the host's, and every access ordered.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/fsdp/fully_sharded_data_parallel.h"
#include "tests/cuda/ddp_fixture.h"
#include "tests/cuda/device_fixture.h"
#include "tests/cuda/trained_replica.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Three steps.
void train(TrainedReplica& replica, int global_rank, int begin, c10::Device device) {
  for (int step = begin; step < begin + 3; ++step) replica.step(batch(global_rank, step, device));
}

/// All ranks, then two of them, then all again, where one is new.
std::vector<at::Tensor> train_replicas(const Group& world, c10::Device device) {
  const int me = world->rank();
  auto replica = std::make_unique<TrainedReplica>(world, device, Sharing::State);
  train(*replica, me, 0, device);
  const Group pair = world->split({0, 2}, "pair");
  if (pair) {
    replica->rejoin(pair);
    train(*replica, me, 3, device);
    replica->rejoin(world);
  } else {
    replica = std::make_unique<TrainedReplica>(world, device, Sharing::State);
  }
  train(*replica, me, 6, device);
  if (pair) pair->shutdown();
  return replica->net.values();
}

/// One rank breaks off while its buckets are on their way, and the group is aborted.
std::vector<at::Tensor> train_after_an_abort(const Group& world, c10::Device device) {
  const int me = world->rank();
  const Group first = world->split({0, 1}, "first");
  TrainedReplica replica(first, device, Sharing::State);
  train(replica, me, 0, device);
  const at::Tensor loss = replica.loss(batch(me, 3, device));
  world->barrier();
  bool breaks = me == 0;
  replica.net[1].register_hook([&](const at::Tensor& gradient) {
    if (breaks) throw std::runtime_error("in the middle of a pass");
    return gradient;
  });
  try {
    loss.backward();
    expect(me != 0, "the hook throws");
  } catch (const std::exception&) {
    // Of rank 1: the abort, where it is heard in time.
  }
  breaks = false;
  if (me == 0) first->abort("a rank has died");
  expect(contains(message_of<Error>([&] { first->barrier(); }), "a rank has died"), "why");
  replica.rejoin(world);
  train(replica, me, 4, device);
  first->shutdown();
  return replica.net.values();
}

/// A linear layer that begins on the device: `to` would need tensors that devices share.
struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t in, std::int64_t out, double seed, c10::Device device) {
    const auto wave = [&](at::IntArrayRef sizes) {
      const at::Tensor numbers = at::arange(c10::multiply_integers(sizes), at::kFloat);
      return at::sin(numbers * 0.7 + seed).view(sizes).to(device);
    };
    weight = register_parameter("weight", wave({out, in}));
    bias = register_parameter("bias", wave({out}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(Layer);

/// Sizes that no number of ranks divides.
struct ShardedLayers : torch::nn::Module {
  explicit ShardedLayers(c10::Device device) : in(5, 7, 1, device), out(7, 3, 2, device) {
    register_module("in", in);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = at::tanh(sharded_forward(in, x));
    if (fails) throw std::runtime_error("in the middle of a forward");
    return sharded_forward(out, hidden);
  }
  Layer in;
  Layer out;
  bool fails = false;
};

using Sharded = FullyShardedDataParallel<ShardedLayers>;

std::unique_ptr<Sharded> shard(const std::shared_ptr<ShardedLayers>& net, const Group& group) {
  const ShardOptions options{.shard = group};
  fully_shard(net->in, options, "in");
  fully_shard(net->out, options, "out");
  return std::make_unique<Sharded>(net, options);
}

/// Three steps of plain gradient descent.
void train_sharded(Sharded& model, const ShardedLayers& net, int global_rank, int begin,
                   c10::Device device) {
  torch::optim::SGD optimizer(net.parameters(), 0.1);
  for (int step = begin; step < begin + 3; ++step) {
    optimizer.zero_grad();
    model.forward(batch(global_rank, step, device)).pow(2).mean().backward();
    optimizer.step();
  }
}

std::vector<at::Tensor> values_of(const FullState& state) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : state) values.push_back(tensor.cpu());
  return values;
}

/// All ranks, then two of them with what a snapshot would give back.
std::vector<at::Tensor> train_shards(const Group& world, c10::Device device) {
  const auto net = std::make_shared<ShardedLayers>(device);
  const auto model = shard(net, world);
  train_sharded(*model, *net, world->rank(), 0, device);
  FullState state = model->full_state();
  const Group pair = world->split({2, 1}, "pair");
  if (pair) {
    model->rejoin(pair);
    model->load_full_state(state);
    train_sharded(*model, *net, world->rank(), 3, device);
    state = model->full_state();
    pair->shutdown();
  }
  return values_of(state);
}

/// Two ranks break off in the middle of a pass; where they go on, one is new.
std::vector<at::Tensor> train_shards_after_an_abort(const Group& world, c10::Device device) {
  const int me = world->rank();
  const Group pair = world->split({0, 2}, "pair");
  const auto net = std::make_shared<ShardedLayers>(device);
  std::unique_ptr<Sharded> model;
  if (pair) {
    model = shard(net, pair);
    const at::Tensor pending = model->forward(batch(me, 0, device)).pow(2).mean();
    net->fails = true;
    message_of<std::runtime_error>([&] { model->forward(batch(me, 1, device)); });
    net->fails = false;
    pair->abort("a rank has died");
    message_of<Error>([&] { model->forward(batch(me, 2, device)).sum().backward(); });
    model->rejoin(world);
  } else {
    model = shard(net, world);
  }
  const auto other = std::make_shared<ShardedLayers>(device);
  model->load_full_state(shard(other, world)->full_state());
  train_sharded(*model, *net, me, 3, device);
  return values_of(model->full_state());
}

}  // namespace

TEST_CASE("replicas and their shared AdamW go on in other groups, on devices", "[ddp][rejoin]") {
  expect_as_on_host(3, train_replicas);
}

TEST_CASE("what was in flight on devices when a group was aborted is gone", "[ddp][rejoin]") {
  expect_as_on_host(2, train_after_an_abort);
}

TEST_CASE("shards go on in a group of another size, on devices", "[fsdp][rejoin]") {
  expect_as_on_host(3, train_shards);
}

TEST_CASE("shards go on where a pass broke off, on devices", "[fsdp][rejoin]") {
  expect_as_on_host(3, train_shards_after_an_abort);
}
