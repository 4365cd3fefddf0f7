// A model that goes on in another group does what one that was made there would.

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/distributed_data_parallel.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/reducer.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

/// Two layers, the same on all ranks.
struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    in = register_module("in", torch::nn::Linear(4, 6));
    out = register_module("out", torch::nn::Linear(6, 2));
    calls = register_buffer("calls", at::zeros({1}));
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      const at::NoGradGuard no_grad;
      parameters()[i].fill_(0.1 * static_cast<double>(i + 1));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    calls.add_(1);
    return out->forward(at::tanh(in->forward(x)));
  }
  torch::nn::Linear in = nullptr;
  torch::nn::Linear out = nullptr;
  at::Tensor calls;
};

void train_in(TwoLayers& net, bool trains) {
  for (const at::Tensor& parameter : net.in->parameters()) parameter.set_requires_grad(trains);
}

using WrappedLayers = DistributedDataParallel<TwoLayers>;
constexpr std::size_t kSmallBytes = 64;

at::Tensor batch_for(int global_rank, int step) {
  return at::full({2, 4}, 0.1 * (global_rank + 1) + 0.01 * step);
}

/// A few steps of this rank, and the weights afterwards.
std::vector<at::Tensor> train_on(WrappedLayers& model, torch::optim::SGD& optimizer,
                                 int global_rank, int begin) {
  for (int step = begin; step < begin + 3; ++step) {
    optimizer.zero_grad();
    model.forward(batch_for(global_rank, step)).pow(2).mean().backward();
    optimizer.step();
  }
  return model->parameters();
}

void expect_same_weights(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) expect(a[i].equal(b[i]), "the same weights");
}

TEST_CASE("a model goes on in a smaller group as one that is made there", "[ddp][rejoin]") {
  with_groups(3, [](const Group& world) {
    const int me = world->rank();
    const auto net = std::make_shared<TwoLayers>();
    WrappedLayers model(net, world, {.cap_bytes = kSmallBytes, .first_bytes = kSmallBytes});
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    train_on(model, optimizer, me, 0);
    const Group pair = world->split({1, 2}, "pair");
    if (!pair) return;
    const auto fresh = std::make_shared<TwoLayers>();
    for (std::size_t i = 0; i < fresh->parameters().size(); ++i) {
      const at::NoGradGuard no_grad;
      fresh->parameters()[i].copy_(net->parameters()[i]);
    }
    fresh->calls.copy_(net->calls);
    WrappedLayers other(fresh, pair, {.cap_bytes = kSmallBytes, .first_bytes = kSmallBytes});
    torch::optim::SGD own(fresh->parameters(), 0.5);
    const std::vector<at::Tensor> before = net->parameters();
    model.rejoin(pair);
    expect(net->parameters()[0].is_same(before[0]), "the same objects");
    expect(!net->parameters()[0].grad().defined(), "no gradients of before");
    expect_same_weights(train_on(model, optimizer, me, 3), train_on(other, own, me, 3));
    expect(net->calls.equal(fresh->calls), "the same buffers");
    pair->shutdown();
  });
}

TEST_CASE("a newcomer constructs where a survivor rejoins", "[ddp][rejoin]") {
  with_groups(2, [](const Group& world) {
    const Group alone = world->split({world->rank()}, world->rank() == 0 ? "first" : "second");
    const auto net = std::make_shared<TwoLayers>();
    const bool survives = world->rank() == 1;
    const at::NoGradGuard no_grad;
    net->out->bias.fill_(world->rank() + 5.0);
    std::unique_ptr<WrappedLayers> model;
    if (survives) model = std::make_unique<WrappedLayers>(net, alone);
    if (survives) train_in(*net, false);  // a newcomer has not frozen it yet
    if (survives) {
      model->rejoin(world);
      expect(!net->in->weight.requires_grad(), "still frozen");
      train_in(*net, true);
    } else {
      model = std::make_unique<WrappedLayers>(net, world);
    }
    expect(net->out->bias.eq(5.0).all().item<bool>(), "rank 0's values");
    const at::AutoGradMode with_grad(true);
    model->forward(batch_for(world->rank(), 0)).sum().backward();
    const at::Tensor mine = net->in->weight.grad().clone();
    world->broadcast(mine, 0);
    expect(mine.equal(net->in->weight.grad()), "averaged, what was frozen too");
    alone->shutdown();
  });
}

TEST_CASE("what was in flight in a group that failed is gone", "[ddp][rejoin]") {
  with_groups(2, [](const Group& world) {
    const Group first = world->split({0, 1}, "first");
    const auto net = std::make_shared<TwoLayers>();
    WrappedLayers model(net, first, {.cap_bytes = kSmallBytes, .first_bytes = kSmallBytes});
    model.forward(batch_for(0, 0)).sum().backward();
    const at::Tensor loss = model.forward(batch_for(0, 1)).sum();
    world->barrier();         // the abort ends the other rank's backward, not its forward
    bool has_failed = false;  // outlives the hook's calls
    if (world->rank() == 0) {
      // Its buckets are on their way when the pass breaks off.
      net->in->bias.register_hook([&](const at::Tensor& grad) {
        if (!has_failed) throw std::runtime_error("in the middle of a pass");
        return grad;
      });
      message_of<std::exception>([&] { loss.backward(); });
      has_failed = true;
      first->abort("a rank has died");
    } else {
      message_of<Error>([&] { loss.backward(); });
    }
    const std::string still = message_of<Error>([&] { model.forward(batch_for(0, 2)); });
    expect(!contains(still, "rejoin"), still);  // its own cause, as ever
    first->shutdown();
    const std::string gone = message_of<StateError>([&] { model.forward(batch_for(0, 2)); });
    expect(contains(gone, "goes on in another one by its rejoin()"), gone);
    model.rejoin(world);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model.forward(at::ones({2, 4}) * (world->rank() + 1.0)).sum().backward();
      expect(net->out->bias.grad().eq(2.0).all().item<bool>(), "the average");
    }
  });
}

TEST_CASE("a hook of compress_hook follows into the other group", "[ddp][rejoin]") {
  with_groups(3, [](const Group& world) {
    const Group pair = world->split({0, 2}, "pair");
    const auto net = std::make_shared<TwoLayers>();
    WrappedLayers model(net, world);
    model.replica().reducer().register_comm_hook(compress_hook(world, at::kBFloat16));
    model.forward(batch_for(world->rank(), 0)).sum().backward();
    if (!pair) return;
    model.rejoin(pair);
    model.forward(batch_for(world->rank(), 0)).sum().backward();
    const at::Tensor grad = net->in->weight.grad();
    expect(grad.equal(grad.to(at::kBFloat16).to(at::kFloat)), "rounded to 16 bits");
    pair->shutdown();
  });
}

TEST_CASE("a rejoin that failed can be repeated", "[ddp][rejoin]") {
  with_groups(2, [](const Group& world) {
    const auto net = std::make_shared<TwoLayers>();
    WrappedLayers model(net, world);
    const at::Tensor bias = net->out->bias;
    if (world->rank() == 1) bias.set_data(at::zeros({3}));
    const std::string differs = message_of<ArgumentError>([&] { model.rejoin(world); });
    expect(contains(differs, "rank 1 has parameter 'out.bias'"), differs);
    const std::string told = message_of<StateError>([&] { model.forward(batch_for(0, 0)); });
    expect(contains(told, "its last rejoin() failed"), told);
    bias.set_data(at::zeros({2}));
    model.rejoin(world);
    model.forward(batch_for(0, 0)).sum().backward();
    expect(bias.grad().defined(), "a gradient");
  });
}

TEST_CASE("mixed precision begins anew from the full one", "[ddp][rejoin]") {
  with_groups(2, [](const Group& world) {
    const auto net = std::make_shared<TwoLayers>();
    const DistributedDataParallelOptions options{
        .mixed_precision = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}};
    WrappedLayers model(net, world, options);
    const at::Tensor pending = model.forward(batch_for(0, 0)).sum();
    expect(net->out->bias.scalar_type() == at::kBFloat16, "low until the backward pass");
    if (world->rank() == 0) {
      model.rejoin(world);
    } else {
      const auto fresh = std::make_shared<TwoLayers>();
      WrappedLayers newcomer(fresh, world,
                             options);  // describes buffers that it has not converted yet
      fresh->zero_grad();
      newcomer.forward(batch_for(0, 0)).sum().backward();
      expect(fresh->out->bias.grad().scalar_type() == at::kFloat, "full gradients");
      return;
    }
    expect(net->out->bias.scalar_type() == at::kFloat, "full between passes");
    expect(net->calls.scalar_type() == at::kBFloat16, "converted again");
    model.forward(batch_for(0, 0)).sum().backward();
    expect(net->out->bias.grad().scalar_type() == at::kFloat, "full gradients");
  });
}

}  // namespace
}  // namespace libddp
