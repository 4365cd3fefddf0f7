// AdamW for LibTorch modules: alone, over sharded units, and shared over a DDP model's ranks.

#include "libddp/optim/adamw.h"
#include "libddp/optim/adamw_shards.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/ddp/distributed_data_parallel.h"
#include "libddp/fsdp/fully_sharded_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::run_group;
using test::run_group_on_hosts;

using Net = torch::nn::Sequential;
using Model = DistributedDataParallel<torch::nn::SequentialImpl>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using torch::optim::AdamWOptions;

/// Sizes that no number of ranks divides, values that depend on the place only.
Net uneven_net() {
  Net net(torch::nn::Linear(5, 33), torch::nn::Tanh(), torch::nn::Linear(33, 3));
  const torch::NoGradGuard no_grad;
  double seed = 0;
  for (at::Tensor& p : net->parameters()) {
    seed += 1;
    p.copy_(torch::sin(torch::arange(p.numel(), torch::kFloat) * 0.7 + seed).view(p.sizes()));
  }
  return net;
}

void backward_at(const std::function<at::Tensor(const at::Tensor&)>& forward, int rank, int step) {
  const at::Tensor x = torch::sin(torch::arange(20, torch::kFloat) * 0.3 + rank * 5 + step);
  forward(x.view({4, 5})).pow(2).mean().backward();
}

/// Small buckets, so that there are several.
std::unique_ptr<Model> wrap(const Net& net, ProcessGroup& group) {
  return std::make_unique<Model>(net, group.shared_from_this(),
                                 Model::Options{.cap_bytes = 300, .first_bytes = 300});
}

Groups decayed_weights(const Net& net, bool amsgrad = false) {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const at::Tensor& p : net->parameters()) (p.dim() > 1 ? weights : biases).push_back(p);
  const auto options = [&](double decay) {
    return std::make_unique<AdamWOptions>(
        AdamWOptions(0.01).weight_decay(decay).betas({0.8, 0.95}).amsgrad(amsgrad));
  };
  Groups groups;
  groups.emplace_back(weights, options(0.1));
  groups.emplace_back(biases, options(0.0));
  return groups;
}

void train(Model& model, torch::optim::Optimizer& optimizer, int rank, int first, int end) {
  for (int step = first; step < end; ++step) {
    optimizer.zero_grad();
    backward_at([&](const at::Tensor& x) { return model.forward(x); }, rank, step);
    optimizer.step();
  }
}

void expect_equal_parameters(const Net& net, const Net& wanted, const std::string& what) {
  const auto found = net->parameters();
  const auto others = wanted->parameters();
  for (std::size_t i = 0; i < found.size(); ++i) test::expect_equal(found[i], others[i], what);
}

std::int64_t numel_of_state(torch::optim::Optimizer& optimizer) {
  std::int64_t numel = 0;
  for (const auto& [key, state] : optimizer.state()) {
    numel += static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().numel();
  }
  return numel;
}

}  // namespace

TEST_CASE("AdamW is torch's by options, groups, schedulers and closures", "[adamw]") {
  const Net net = uneven_net();
  const Net other = uneven_net();
  libddp::AdamW optimizer(decayed_weights(net, true));
  torch::optim::AdamW torchs(decayed_weights(other, true));
  torch::optim::StepLR schedule(optimizer, 2, 0.5);
  torch::optim::StepLR torch_schedule(torchs, 2, 0.5);
  for (int step = 0; step < 6; ++step) {
    const auto run = [&](const Net& one, torch::optim::Optimizer& its) {
      return its.step([&] {
        its.zero_grad();
        backward_at([&](const at::Tensor& x) { return Net(one)->forward(x); }, 0, step);
        return torch::full({}, step);
      });
    };
    REQUIRE(run(net, optimizer).item<int>() == step);
    run(other, torchs);
    schedule.step();
    torch_schedule.step();
  }
  const auto found = net->parameters();
  for (std::size_t i = 0; i < found.size(); ++i) {
    // torch's C++ class rounds otherwise than its fused kernel.
    REQUIRE(torch::allclose(found[i], other->parameters()[i], 1e-4, 1e-5));
  }
}

TEST_CASE("AdamW takes a parameter's gradient when there is one", "[adamw]") {
  const Net net = uneven_net();
  libddp::AdamW optimizer(net->parameters(), AdamWOptions(0.1), {.maximize = true});
  optimizer.step();
  REQUIRE(optimizer.state().empty());
  const at::Tensor last = net->parameters().back();
  const at::Tensor before = last.detach().clone();
  last.mutable_grad() = torch::ones_like(last);
  optimizer.step();
  REQUIRE(optimizer.state().size() == 1);
  REQUIRE((last > before * 0.99).all().item<bool>());  // up, after a decay of 0.1 %
  // Adjacent or not, all counts go on by themselves.
  for (const at::Tensor& p : net->parameters()) p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  const auto steps_of = [&](const at::Tensor& p) {
    auto& state = *optimizer.state().at(p.unsafeGetTensorImpl());
    return static_cast<torch::optim::AdamWParamState&>(state).step();
  };
  REQUIRE(steps_of(last) == 2);
  REQUIRE(steps_of(net->parameters()[0]) == 1);
}

TEST_CASE("AdamW updates a parameter that is listed twice once", "[adamw]") {
  Net net = uneven_net();
  Net twice = uneven_net();
  twice->register_parameter("tied", twice->parameters()[0]);
  AdamW optimizer(net->parameters(), AdamWOptions(0.1));
  AdamW other(twice->parameters(), AdamWOptions(0.1));
  REQUIRE(other.parameters().size() == net->parameters().size());
  for (int step = 0; step < 2; ++step) {
    for (const Net& each : {net, twice}) {
      backward_at([&](const at::Tensor& x) { return Net(each)->forward(x); }, 0, step);
    }
    optimizer.step();
    other.step();
  }
  for (std::size_t i = 0; i < other.parameters().size(); ++i) {
    REQUIRE(torch::equal(other.parameters()[i], optimizer.parameters()[i]));
  }
  Groups groups;
  for (int i = 0; i < 2; ++i) groups.emplace_back(net->parameters());
  REQUIRE(contains(message_of<ArgumentError>([&] { AdamW(std::move(groups)); }),
                   "a parameter of shape [33, 5] is in two groups"));
}

TEST_CASE("AdamW shared over the ranks is AdamW on each of them, bit for bit", "[adamw]") {
  const auto [hosts, amsgrad] =
      GENERATE(table<std::vector<int>, bool>({{{0}, false}, {{0, 0}, true}, {{0, 1}, false}}));
  const bool shard_gradients = GENERATE(false, true);
  const int world_size = static_cast<int>(hosts.size());
  run_group_on_hosts(hosts, [&](ProcessGroup& group) {
    const Net net = uneven_net();
    const Net other = uneven_net();
    const auto model = wrap(net, group);
    const auto plain = wrap(other, group);
    libddp::AdamW shared(
        decayed_weights(net, amsgrad), {},
        {.maximize = amsgrad, .shard_over = &model->replica(), .shard_gradients = shard_gradients});
    libddp::AdamW whole(decayed_weights(other, amsgrad), {}, {.maximize = amsgrad});
    train(*model, shared, group.rank(), 0, 4);
    train(*plain, whole, group.rank(), 0, 4);
    expect_equal_parameters(net, other, "after four steps");
    const at::Tensor numel = torch::full({}, numel_of_state(shared), torch::kLong);
    expect(world_size == 1 || numel.item<std::int64_t>() < 0.75 * numel_of_state(whole), "a part");
    group.all_reduce(numel);
    expect(numel.item<std::int64_t>() == numel_of_state(whole), "all parts are the whole");
    // Another rate from here on, as a scheduler sets it.
    for (auto* one : {&shared, &whole}) {
      for (auto& g : one->param_groups()) g.options().set_lr(0.002);
    }
    train(*model, shared, group.rank(), 4, 6);
    train(*plain, whole, group.rank(), 4, 6);
    expect_equal_parameters(net, other, "with another rate");
  });
}

TEST_CASE("AdamW's shared work clips by the whole model's norm", "[adamw]") {
  const double norm_type = GENERATE(2.0, std::numeric_limits<double>::infinity());
  const bool shard_gradients = GENERATE(false, true);
  run_group(2, [&](ProcessGroup& group) {
    const Net net = uneven_net();
    const Net other = uneven_net();
    const auto model = wrap(net, group);
    const auto plain = wrap(other, group);
    libddp::AdamW shared(net->parameters(), AdamWOptions(0.01),
                         {.shard_over = &model->replica(), .shard_gradients = shard_gradients});
    libddp::AdamW whole(other->parameters(), AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) {
      shared.zero_grad();
      whole.zero_grad();
      backward_at([&](const at::Tensor& x) { return model->forward(x); }, group.rank(), step);
      backward_at([&](const at::Tensor& x) { return plain->forward(x); }, group.rank(), step);
      const at::Tensor norm = shared.clip_grad_norm(0.01, norm_type);
      const double wanted = torch::nn::utils::clip_grad_norm_(other->parameters(), 0.01, norm_type);
      expect(std::abs(norm.item<double>() - wanted) < 1e-5 * wanted, "the same norm");
      if (!shard_gradients) expect(norm.item<double>() == wanted, "of the same gradients");
      shared.step();
      whole.step();
    }
    const auto found = net->parameters();
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect(torch::allclose(found[i], other->parameters()[i], 1e-4, 1e-5), "clipped alike");
    }
  });
}

TEST_CASE("AdamW's archives pass between ranks, torch and back", "[adamw]") {
  const std::vector<int> hosts = GENERATE(std::vector<int>{0, 0}, std::vector<int>{0, 1});
  run_group_on_hosts(hosts, [&](ProcessGroup& group) {
    const Net net = uneven_net();
    const Net other = uneven_net();
    const auto model = wrap(net, group);
    const auto plain = wrap(other, group);
    libddp::AdamW shared(decayed_weights(net), {}, {.shard_over = &model->replica()});
    libddp::AdamW whole(decayed_weights(other));
    train(*model, shared, group.rank(), 0, 3);
    train(*plain, whole, group.rank(), 0, 3);
    std::stringstream from_shared;
    torch::save(shared, from_shared);
    std::stringstream from_whole;
    torch::save(whole, from_whole);
    group.barrier();
    // The shared one's into torch's class and on to the plain one; the plain one's into the shared
    // one, and into one that has not seen a pass.
    torch::optim::AdamW torchs(decayed_weights(other));
    torch::load(torchs, from_shared);
    expect(numel_of_state(torchs) == numel_of_state(whole), "whole tensors");
    std::stringstream from_torch;
    torch::save(torchs, from_torch);
    torch::load(whole, from_torch);
    const std::string bytes = from_whole.str();
    std::stringstream again(bytes);
    torch::load(shared, again);
    const Net third = uneven_net();
    {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < third->parameters().size(); ++i) {
        third->parameters()[i].copy_(other->parameters()[i]);
      }
    }
    const auto late = wrap(third, group);
    libddp::AdamW fresh(decayed_weights(third), {}, {.shard_over = &late->replica()});
    std::stringstream once_more(bytes);
    torch::load(fresh, once_more);
    train(*model, shared, group.rank(), 3, 5);
    train(*plain, whole, group.rank(), 3, 5);
    train(*late, fresh, group.rank(), 3, 5);
    expect_equal_parameters(net, other, "after loading");
    expect_equal_parameters(third, other, "after loading early");
  });
}

TEST_CASE("AdamW over sharded units is AdamW over the whole, bit for bit", "[adamw]") {
  run_group(2, [](ProcessGroup& group) {
    const Net net = uneven_net();
    const Net other = uneven_net();
    const ShardOptions options{.shard = group.shared_from_this()};
    fully_shard_each(net, options);
    FullyShardedDataParallel<torch::nn::SequentialImpl> model(net, options);
    const auto plain = wrap(other, group);
    libddp::AdamW sharded(decayed_weights(net));
    libddp::AdamW whole(decayed_weights(other));
    for (int step = 0; step < 4; ++step) {
      sharded.zero_grad();
      backward_at([&](const at::Tensor& x) { return model.forward(x); }, group.rank(), step);
      sharded.step();
    }
    train(*plain, whole, group.rank(), 0, 4);
    const FullState state = model.full_state();
    for (const auto& item : other->named_parameters()) {
      test::expect_equal(state.at(item.key()), item.value().detach(), item.key());
    }
  });
}

TEST_CASE("AdamW refuses what it cannot share", "[adamw]") {
  run_group(1, [](ProcessGroup& group) {
    const Net net = uneven_net();
    const auto model = wrap(net, group);
    const AdamWExtras shard{.shard_over = &model->replica()};
    std::vector<at::Tensor> some = net->parameters();
    some.pop_back();
    const auto text = [&](const std::vector<at::Tensor>& parameters) {
      return message_of<ArgumentError>([&] { libddp::AdamW(parameters, {}, shard); });
    };
    expect(contains(text(some), "the optimizer lacks '2.bias' of the model's trained"), "missing");
    some.push_back(torch::ones({7}, torch::requires_grad()));
    expect(contains(text(some), "parameter 3 of the optimizer, [7], is not one that"), "foreign");
    libddp::AdamW optimizer(net->parameters(), {}, shard);
    expect(contains(message_of<StateError>([&] { libddp::AdamW(net->parameters(), {}, shard); }),
                    "another optimizer shares it already"),
           "a second one");
    expect(contains(message_of<StateError>([&] { optimizer.clip_grad_norm(1); }),
                    "no backward pass has averaged gradients yet"),
           "too early");
    libddp::AdamW plain(net->parameters());
    expect(contains(message_of<StateError>([&] { plain.clip_grad_norm(1); }),
                    "is for an optimizer with shard_over"),
           "nothing shared");
    const auto alone = [&] { libddp::AdamW(net->parameters(), {}, {.shard_gradients = true}); };
    expect(contains(message_of<ArgumentError>(alone), "shard_gradients without shard_over"),
           "gradients of no model");
    optimizer.add_param_group(std::vector<at::Tensor>{some.back()});
    expect(contains(message_of<ArgumentError>([&] { optimizer.step(); }), "parameter 4 of the"),
           "added later");
  });
}

TEST_CASE("AdamW's shared step needs averages and a model", "[adamw]") {
  run_group(2, [](ProcessGroup& group) {
    const Net net = uneven_net();
    auto model = wrap(net, group);
    libddp::AdamW optimizer(net->parameters(), {}, {.shard_over = &model->replica()});
    optimizer.step();  // nothing to do
    const auto forward = [&](const at::Tensor& x) { return model->forward(x); };
    {
      const auto guard = model->no_sync();
      backward_at(forward, group.rank(), 0);
    }
    expect(contains(message_of<StateError>([&] { optimizer.step(); }), "has not been averaged"),
           "a local pass");
    train(*model, optimizer, group.rank(), 0, 1);
    // An archive of another model.
    libddp::AdamW other(std::vector<at::Tensor>{torch::ones({2}), torch::ones({2}),
                                                torch::ones({2}), torch::ones({2})});
    for (const at::Tensor& p : other.param_groups()[0].params()) p.mutable_grad() = p.clone();
    other.step();
    std::stringstream archive;
    torch::save(other, archive);
    expect(contains(message_of<ArgumentError>([&] { torch::load(optimizer, archive); }),
                    "'exp_avg' of '0.weight' has [2], and the parameter has [33, 5]"),
           "another shape");
    model.reset();
    expect(contains(message_of<StateError>([&] { optimizer.step(); }), "was replaced since"),
           "no model");
  });
}

TEST_CASE("AdamW's shared work goes on in another group", "[adamw]") {
  run_group(3, [](ProcessGroup& world) {
    const Group pair = world.split({1, 2}, "pair");
    const Net net = uneven_net();
    const auto model = wrap(net, world);
    libddp::AdamW optimizer(decayed_weights(net), {}, {.shard_over = &model->replica()});
    train(*model, optimizer, world.rank(), 0, 3);
    if (!pair) return;
    const Net other = uneven_net();
    const auto fresh = wrap(other, *pair);
    libddp::AdamW own(decayed_weights(other), {}, {.shard_over = &fresh->replica()});
    model->rejoin(pair);
    torch::serialize::OutputArchive archive;
    for (const std::string& told : {message_of<StateError>([&] { optimizer.step(); }),
                                    message_of<StateError>([&] { optimizer.save(archive); })}) {
      expect(contains(told, "Hint: call the optimizer's rejoin()"), told);
    }
    optimizer.rejoin(model->replica());
    expect(optimizer.state().empty(), "the state is dropped");
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      net->parameters()[i].copy_(other->parameters()[i]);
    }
    const at::AutoGradMode with_grad(true);
    train(*model, optimizer, world.rank(), 3, 6);
    train(*fresh, own, world.rank(), 3, 6);
    expect_equal_parameters(net, other, "as one that was made there");
    pair->shutdown();
  });
}

TEST_CASE("AdamW updates dense floating-point parameters", "[adamw]") {
  const at::Tensor sparse = torch::ones({3}, torch::requires_grad());
  sparse.mutable_grad() = torch::ones({3}).to_sparse();
  libddp::AdamW optimizer(std::vector<at::Tensor>{sparse});
  REQUIRE(contains(message_of<ArgumentError>([&] { optimizer.step(); }),
                   "this one is with a sparse gradient [3]"));
  const at::Tensor whole = torch::ones({2}, torch::kLong);
  REQUIRE(contains(message_of<ArgumentError>([&] { check_adamw_parameters({whole}); }),
                   "this one is Long on cpu [2]"));
}

}  // namespace libddp
