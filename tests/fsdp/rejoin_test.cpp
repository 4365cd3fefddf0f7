// Sharded models that go on in another group, against ones that are made there.

#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "libddp/fsdp/fully_sharded_data_parallel.h"
#include "libddp/fsdp/sharded_model.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::run_group;

/// Sizes that no number of ranks divides.
struct MovedNetImpl : torch::nn::Module {
  MovedNetImpl() {
    register_module("blocks", blocks);
    register_module("head", head);
    const torch::NoGradGuard no_grad;
    double seed = 0;
    for (at::Tensor& p : parameters()) {
      seed += 1;
      p.copy_(torch::sin(torch::arange(p.numel(), torch::kFloat) * 0.7 + seed).view(p.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = blocks->forward(x);
    if (fails) throw std::runtime_error("in the middle of a forward");
    return sharded_forward(head, hidden);
  }
  torch::nn::Sequential blocks{torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 6)};
  torch::nn::Linear head{6, 3};
  bool fails = false;
};
TORCH_MODULE(MovedNet);

using MovedModel = FullyShardedDataParallel<MovedNetImpl>;

std::unique_ptr<MovedModel> shard_moved(const MovedNet& net, const ShardOptions& options) {
  fully_shard(net->head, options, "head");  // behind the blocks in the module, before them here
  fully_shard_each(net->blocks, options);
  return std::make_unique<MovedModel>(net, options);
}

at::Tensor moved_loss(MovedModel& model, int global_rank, int step) {
  const at::Tensor x = torch::sin(torch::arange(20, torch::kFloat) * 0.3 + global_rank * 5 + step);
  return model.forward(x.view({4, 5})).pow(2).mean();
}

void train_moved(MovedModel& model, torch::optim::Optimizer& optimizer, int global_rank,
                 int begin) {
  for (int step = begin; step < begin + 3; ++step) {
    optimizer.zero_grad();
    moved_loss(model, global_rank, step).backward();
    optimizer.step();
  }
}

void expect_same_state(MovedModel& model, MovedModel& wanted) {
  const FullState found = model.full_state();
  for (const auto& [name, tensor] : wanted.full_state()) {
    test::expect_equal(found.at(name), tensor, name);
  }
}

ShardOptions over(const Group& group) { return {.shard = group}; }

}  // namespace

TEST_CASE("a sharded model goes on in a group of another size", "[fsdp][rejoin]") {
  run_group(3, [](ProcessGroup& world) {
    const Group all = world.shared_from_this();
    MovedNet net;
    const auto model = shard_moved(net, over(all));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    train_moved(*model, optimizer, world.rank(), 0);
    const FullState state = model->full_state();
    const Group pair = world.split({2, 1}, "pair");
    if (!pair) return;
    const MovedNet other;
    const auto fresh = shard_moved(other, over(pair));
    torch::optim::SGD own(other->parameters(), 0.1);
    fresh->load_full_state(state);
    const std::vector<at::Tensor> before = net->parameters();
    model->rejoin(pair);
    for (std::size_t i = 0; i < before.size(); ++i) {
      expect(net->parameters()[i].is_same(before[i]), "the same objects");
      expect(before[i].isnan().all().item<bool>(), "values that nobody takes for loaded ones");
      expect(!before[i].grad().defined(), "no gradients of before");
    }
    model->load_full_state(state);
    train_moved(*model, optimizer, world.rank(), 3);
    train_moved(*fresh, own, world.rank(), 3);
    expect_same_state(*model, *fresh);
    pair->shutdown();
  });
}

TEST_CASE("newcomers shard where survivors rejoin", "[fsdp][rejoin]") {
  run_group(3, [](ProcessGroup& world) {
    const Group all = world.shared_from_this();
    const Group pair = world.split({0, 2}, "pair");
    MovedNet net;
    std::unique_ptr<MovedModel> model;
    if (pair) {
      model = shard_moved(net, over(pair));
      // What a rank that has died leaves the others in.
      const at::Tensor pending = moved_loss(*model, world.rank(), 0);
      net->fails = true;
      message_of<std::runtime_error>([&] { moved_loss(*model, world.rank(), 1); });
      net->fails = false;
      pair->abort("a rank has died");
      const std::string still =
          message_of<Error>([&] { moved_loss(*model, world.rank(), 2).backward(); });
      expect(contains(still, "a rank has died"), still);
      model->rejoin(all);
    } else {
      model = shard_moved(net, over(all));
    }
    const MovedNet other;
    const auto fresh = shard_moved(other, over(all));
    model->load_full_state(fresh->full_state());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    torch::optim::SGD own(other->parameters(), 0.1);
    train_moved(*model, optimizer, world.rank(), 0);
    train_moved(*fresh, own, world.rank(), 0);
    expect_same_state(*model, *fresh);
  });
}

TEST_CASE("units that shard and replicate want both groups", "[fsdp][rejoin]") {
  run_group(4, [](ProcessGroup& world) {
    const int rank = world.rank();
    const Group shard = world.split({rank / 2 * 2, rank / 2 * 2 + 1}, fmt::format("s{}", rank / 2));
    const Group replicate = world.split({rank % 2, rank % 2 + 2}, fmt::format("r{}", rank % 2));
    MovedNet net;
    const auto model = shard_moved(net, {.shard = shard, .replicate = replicate});
    const FullState state = model->full_state();
    const std::string told =
        message_of<ArgumentError>([&] { model->rejoin(world.shared_from_this()); });
    expect(contains(told, "Hint: rejoin(shard, replicate)"), told);
    model->rejoin(replicate, shard);
    model->load_full_state(state);
    moved_loss(*model, rank, 0).backward();
    expect(net->head->bias.grad().defined(), "gradients");
    shard->shutdown();
    replicate->shutdown();
  });
}

TEST_CASE("a sharded model whose rejoin failed can repeat it", "[fsdp][rejoin]") {
  run_group(2, [](ProcessGroup& world) {
    const Group all = world.shared_from_this();
    const Group gone = world.split({0, 1}, "gone");
    MovedNet net;
    const auto model = shard_moved(net, over(all));
    const FullState state = model->full_state();
    gone->shutdown();
    message_of<StateError>([&] { model->rejoin(gone); });
    for (const std::string& told : {message_of<StateError>([&] { moved_loss(*model, 0, 0); }),
                                    message_of<StateError>([&] { model->full_state(); })}) {
      expect(contains(told, "last rejoin() failed"), told);
    }
    model->rejoin(all);
    model->load_full_state(state);
    moved_loss(*model, 0, 0).backward();
    expect(net->head->bias.grad().defined(), "gradients");
  });
}

}  // namespace libddp
