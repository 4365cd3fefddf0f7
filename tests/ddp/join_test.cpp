// Ranks with different numbers of batches against one process that adds up what each of them has.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/ddp/distributed_data_parallel.h"
#include "libddp/optim/adamw.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

using Model = DistributedDataParallel<torch::nn::SequentialImpl>;

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  const torch::NoGradGuard no_grad;
  double seed = 0;
  for (at::Tensor& p : net->parameters()) {
    seed += 1;
    p.copy_(torch::sin(torch::arange(p.numel(), torch::kFloat) + seed).view(p.sizes()));
  }
  return net;
}

at::Tensor loss_of(const at::Tensor& y) { return y.pow(2).mean(); }

at::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(12, torch::kFloat) * 0.3 + rank * 5 + step).view({4, 3});
}

/// What all ranks end with: in each step the gradients of those that have a batch.
std::vector<at::Tensor> trained_alone(const std::vector<int>& num_batches, bool over_all) {
  torch::nn::Sequential net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const int most = *std::max_element(num_batches.begin(), num_batches.end());
  for (int step = 0; step < most; ++step) {
    optimizer.zero_grad();
    std::vector<int> active;
    for (int rank = 0; rank < static_cast<int>(num_batches.size()); ++rank) {
      if (step < num_batches[rank]) active.push_back(rank);
    }
    const auto divisor = static_cast<double>(over_all ? num_batches.size() : active.size());
    for (const int rank : active) {
      (loss_of(net->forward(batch_of(rank, step))) / divisor).backward();
    }
    optimizer.step();
  }
  return net->parameters();
}

void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& wanted) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    expect(torch::allclose(actual[i], wanted[i], 1e-5, 1e-6), "parameter " + std::to_string(i));
  }
}

}  // namespace

TEST_CASE("ranks with fewer batches end with the model of those with more", "[join]") {
  const bool over_all = GENERATE(true, false);
  const std::vector<int> num_batches =
      GENERATE(values<std::vector<int>>({{1, 4, 2}, {3, 3, 3}, {0, 2, 2}, {5, 0, 0}, {0, 0, 0}}));
  const auto wanted = trained_alone(num_batches, over_all);
  with_groups(3, [&](const Group& group) {
    torch::nn::Sequential net = make_net();
    Model model(net, group, {.cap_bytes = 40, .first_bytes = 40});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto train = [&] {
      for (int step = 0; step < num_batches[group->rank()]; ++step) {
        optimizer.zero_grad();
        loss_of(model.forward(batch_of(group->rank(), step))).backward();
        optimizer.step();
      }
    };
    model.join(train, {.divide_by_initial_world_size = over_all});
    expect_close(net->parameters(), wanted);
    // Later passes are as before.
    net->zero_grad();
    loss_of(model.forward(batch_of(group->rank(), 9))).backward();
    torch::nn::Sequential alone = make_net();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const torch::NoGradGuard no_grad;
      alone->parameters()[i].copy_(wanted[i]);
    }
    for (int rank = 0; rank < 3; ++rank) {
      (loss_of(alone->forward(batch_of(rank, 9))) / 3).backward();
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      expect(
          torch::allclose(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-4, 1e-5),
          "the average of all ranks");
    }
  });
}

TEST_CASE("a rank that is done waits through passes that do not average", "[join]") {
  with_groups(2, [](const Group& group) {
    torch::nn::Sequential net = make_net();
    Model model(net, group);
    const int rank = group->rank();
    model.join([&] {
      if (rank == 0) return;
      {
        const auto guard = model.no_sync();
        loss_of(model.forward(batch_of(1, 0))).backward();
      }
      {
        const torch::NoGradGuard no_grad;
        model.forward(batch_of(1, 1));
      }
      loss_of(model.forward(batch_of(1, 2))).backward();
    });
    if (rank == 0) return;
    torch::nn::Sequential alone = make_net();
    for (const int step : {0, 2}) (loss_of(alone->forward(batch_of(1, step))) / 2).backward();
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
      expect(torch::allclose(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-5),
             "half of what this rank has, as the other one has zeros");
    }
  });
}

TEST_CASE("buffers come from a rank with data while others are done", "[join]") {
  with_groups(3, [](const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    Model model(net, group);
    const int rank = group->rank();
    model.join([&] {
      for (int step = 0; step < (rank == 1 ? 4 : 1); ++step) {
        loss_of(model.forward(batch_of(rank, step))).backward();
      }
    });
    const at::Tensor seen = net->named_buffers()["1.num_batches_tracked"];
    expect(seen.item<std::int64_t>() == 4, "those of the rank that trained to the end");
    const at::Tensor mean = net->named_buffers()["1.running_mean"];
    std::vector<at::Tensor> all;
    for (int i = 0; i < 3; ++i) all.push_back(torch::empty_like(mean));
    group->all_gather(all, mean);
    for (const at::Tensor& each : all) expect(torch::equal(each, mean), "the same on all ranks");
  });
}

TEST_CASE("all ranks may end with the first one, and are told so", "[join]") {
  with_groups(3, [](const Group& group) {
    torch::nn::Sequential net = make_net();
    Model model(net, group);
    int num_steps = 0;
    const auto train = [&] {
      for (int step = 0; step <= group->rank(); ++step) {
        loss_of(model.forward(batch_of(group->rank(), step))).backward();
        ++num_steps;
      }
    };
    const auto text =
        message_of<StateError>([&] { model.join(train, {.throw_on_early_termination = true}); });
    expect(contains(text, "1 of 3 ranks have no more data"), text);
    expect(num_steps == 1, "before the second step");
    // Nothing is left over: the model goes on, in another join too.
    model.join([&] { loss_of(model.forward(batch_of(group->rank(), 0))).backward(); });
  });
}

TEST_CASE("what cannot be joined is refused", "[join]") {
  with_groups(2, [](const Group& group) {
    torch::nn::Sequential net = make_net();
    Model model(net, group);
    const auto nested = [&] { model.join([&] { model.join([] {}); }); };
    const auto text = message_of<StateError>(nested);
    expect(contains(text, "runs in a join already"), text);
    AdamW optimizer(net->parameters(), {}, {.shard_over = &model.replica()});
    const auto sharded = message_of<StateError>([&] { model.join([] {}); });
    expect(contains(sharded, "Hint: leave out AdamW's shard_over"), sharded);
  });
}

}  // namespace libddp
