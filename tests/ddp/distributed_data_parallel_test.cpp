#include "libddp/ddp/distributed_data_parallel.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <map>
#include <optional>
#include <string>

#include "libddp/ddp/compress_hook.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

/// Two layers, one of them used twice, and a buffer that counts forwards.
struct Net : torch::nn::Module {
  Net() {
    in = register_module("in", torch::nn::Linear(4, 4));
    out = register_module("out", torch::nn::Linear(4, 2));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    calls.add_(1);
    const at::Tensor h = at::tanh(in->forward(at::tanh(in->forward(x))));
    const at::Tensor logits = out->forward(h);
    return {logits, logits.pow(2).mean()};
  }
  torch::nn::Linear in = nullptr;
  torch::nn::Linear out = nullptr;
  at::Tensor calls;
};

at::Tensor batch_of(int rank, int step) { return at::full({2, 4}, 0.1 * (rank + 1) + 0.01 * step); }

TEST_CASE("ranks that train together end with the same weights", "[ddp]") {
  const int world_size = GENERATE(2, 3);
  std::vector<std::vector<at::Tensor>> weights(world_size);
  with_groups(world_size, [&](const Group& group) {
    const auto net = std::make_shared<Net>();
    DistributedDataParallel model(net, group, {.cap_bytes = 64, .first_bytes = 32});
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      std::get<1>(model.forward(batch_of(group->rank(), step))).backward();
      optimizer.step();
    }
    weights[group->rank()] = net->parameters();
  });
  for (int rank = 1; rank < world_size; ++rank) {
    for (std::size_t i = 0; i < weights[0].size(); ++i) {
      CHECK(weights[rank][i].equal(weights[0][i]));
    }
  }
}

TEST_CASE("accumulation over no_sync equals one pass over everything", "[ddp]") {
  with_groups(2, [](const Group& group) {
    const auto net = std::make_shared<Net>();
    DistributedDataParallel model(net, group);
    const auto loss = [&](int step) {
      return std::get<1>(model.forward(batch_of(group->rank(), step)));
    };
    (loss(0) + loss(1)).backward();
    const at::Tensor expected = net->in->weight.grad().clone();
    net->zero_grad();
    {
      const auto guard = model.no_sync();
      loss(0).backward();
    }
    loss(1).backward();
    expect(net->in->weight.grad().allclose(expected, 1e-6, 1e-7), "same average");
  });
}

TEST_CASE("buffers come from rank 0 when they are due, and only then", "[ddp]") {
  with_groups(2, [](const Group& group) {
    const auto net = std::make_shared<Net>();
    DistributedDataParallel model(net, group);
    if (group->rank() == 0) net->calls.fill_(100);
    std::get<1>(model.forward(batch_of(0, 0))).backward();
    expect(net->calls.item<long>() == 101, "before the first forward");
    {
      const at::NoGradGuard no_grad;
      model.forward(batch_of(0, 0));
      // After a forward without gradients nothing is due: one rank may go on alone.
      if (group->rank() == 0) model.forward(batch_of(0, 0));
    }
    std::get<1>(model.forward(batch_of(0, 0))).backward();
    expect(net->calls.item<long>() == (group->rank() == 0 ? 104 : 103), "own value");
    std::get<1>(model.forward(batch_of(0, 0))).backward();
    expect(net->calls.item<long>() == 105, "after a synchronising forward");
  });
}

TEST_CASE("module holders are wrapped too", "[ddp]") {
  with_groups(1, [](const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 1));
    DistributedDataParallel model(net, group);
    model.forward(at::ones({2, 3})).sum().backward();
    expect(net->parameters()[0].grad().defined(), "gradient");
    expect(model->size() == 2, "the module shines through");
  });
}

TEST_CASE("guards of accumulation may be made where they are needed", "[ddp]") {
  with_groups(2, [](const Group& group) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 1).bias(false));
    using Model = DistributedDataParallel<torch::nn::LinearImpl>;
    Model model(net, group);
    const at::Tensor mine = at::full({1, 3}, group->rank() + 1.0);
    for (const bool is_last : {false, true}) {
      std::optional<Model::NoSync> guard;
      if (!is_last) guard.emplace(model.no_sync());
      model.forward(mine).sum().backward();
      const bool is_mine = at::equal(net->weight.grad(), mine);
      expect(is_mine == !is_last, "averaged after the last alone");
    }
    expect(at::equal(net->weight.grad(), at::full({1, 3}, 3.0)), "of both passes");
  });
}

TEST_CASE("a parameter that is registered under two names is one", "[ddp]") {
  struct Tied : torch::nn::Module {
    Tied() {
      in = register_module("in", torch::nn::Linear(4, 4));
      tied = register_parameter("tied", in->weight);
    }
    at::Tensor forward(const at::Tensor& x) { return at::linear(in->forward(x), tied); }
    torch::nn::Linear in = nullptr;
    at::Tensor tied;
  };
  const auto set = [](Tied& net) {
    const c10::NoGradGuard no_grad;
    for (at::Tensor& each : net.parameters()) each.fill_(0.1);
  };
  Tied alone;
  set(alone);
  at::Tensor loss = at::zeros({});
  for (int rank = 0; rank < 2; ++rank) loss = loss + alone.forward(batch_of(rank, 0)).sum() / 2;
  loss.backward();
  with_groups(2, [&](const Group& group) {
    const auto net = std::make_shared<Tied>();
    set(*net);
    DistributedDataParallel model(net, group);
    for (int pass = 0; pass < 2; ++pass) {
      net->zero_grad();
      model.forward(batch_of(group->rank(), 0)).sum().backward();
      expect(at::allclose(net->in->weight.grad(), alone.in->weight.grad()), "the average");
      expect(at::allclose(net->in->bias.grad(), alone.in->bias.grad()), "of the others");
    }
  });
}

TEST_CASE("what is null is named", "[ddp]") {
  with_groups(1, [](const Group& group) {
    const auto is_told = [](const auto& call, const std::string& part) {
      const auto text = message_of<ArgumentError>(call);
      expect(contains(text, part), text);
    };
    torch::nn::Linear net(3, 1);
    const std::shared_ptr<torch::nn::LinearImpl> nothing;
    is_told([&] { DistributedDataParallel(net, nullptr); }, "the process group is null");
    is_told([&] { DistributedDataParallel(nothing, group); }, "the module is null");
    is_told([&] { compress_hook(nullptr, at::kHalf); }, "the process group is null");
    DistributedDataParallel model(net, group);
    is_told([&] { model.rejoin(nullptr); }, "the process group is null");
    is_told([&] { model.replica().register_comm_hook(nullptr); }, "hook is null");
    model.forward(at::ones({2, 3})).sum().backward();
    expect(net->weight.grad().defined(), "the model goes on");
  });
}

TEST_CASE("tensors are found in nested outputs", "[ddp]") {
  const at::Tensor a = at::ones({1});
  const std::vector<at::Tensor> many = {a, a};
  CHECK(output_tensors(a).size() == 1);
  CHECK(output_tensors(std::make_tuple(a, 3, std::make_pair(many, a))).size() == 4);
  CHECK(output_tensors(std::map<std::string, at::Tensor>{{"x", a}, {"y", a}}).size() == 2);
  CHECK(output_tensors(std::optional<at::Tensor>(a)).size() == 1);
  CHECK(output_tensors(std::optional<at::Tensor>()).empty());
  CHECK(output_tensors(std::string("text")).empty());
  CHECK(output_tensors(7).empty());
}

}  // namespace
}  // namespace libddp
