// A training that goes on from a snapshot against one that was not interrupted, bit for bit.

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libddp/ddp/distributed_data_parallel.h"
#include "libddp/fsdp/fully_sharded_data_parallel.h"
#include "libddp/optim/adamw.h"
#include "libddp/snapshot/saved_version.h"
#include "libddp/training/training_state.h"
#include "tests/snapshot/kept_job.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::expect_equal;
using test::KeptJob;
using test::message_of;
using test::run_group;
using torch::optim::Optimizer;

/// Buffers, a parameter with two names, dropout, and rows that no number of ranks divides.
struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl() {
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
    tied = register_parameter("tied", head->bias);
    scale = register_parameter("scale", torch::ones({}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return sharded_forward(head, norm(blocks->forward(x)) * scale);
  }

  torch::nn::Sequential blocks{torch::nn::Linear(5, 7), torch::nn::Dropout(0.3),
                               torch::nn::Linear(7, 6)};
  torch::nn::BatchNorm1d norm{6};
  torch::nn::Linear head{6, 3};
  at::Tensor tied, scale;
};
TORCH_MODULE(SmallNet);

/// The same numbers for each call.
SmallNet make_net() {
  torch::manual_seed(7);
  return SmallNet();
}

at::Tensor input_at(int rank, std::int64_t step) {
  return torch::sin(torch::arange(40, torch::kFloat) * 0.3 + rank * 5 + step).view({8, 5});
}

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

template <typename Class, typename Options>
MakeOptimizer making(Options options) {
  return [options](std::vector<at::Tensor> parameters) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Class>(std::move(parameters), options);
  };
}

const std::vector<std::pair<std::string, MakeOptimizer>> kOptimizers{
    {"libddp AdamW", making<AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true))},
    {"AdamW", making<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1))},
    {"Adam", making<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).amsgrad(true))},
    {"SGD", making<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9))},
    {"SGD without momentum", making<torch::optim::SGD>(torch::optim::SGDOptions(1e-2))},
    {"Adagrad", making<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).lr_decay(0.1))},
    {"RMSprop", making<torch::optim::RMSprop>(
                    torch::optim::RMSpropOptions(1e-2).momentum(0.5).centered(true))},
};

template <typename Model>
void train_step(Model& model, Optimizer& optimizer, int rank, std::int64_t step) {
  optimizer.zero_grad();
  model.forward(input_at(rank, step)).pow(2).mean().backward();
  optimizer.step();
}

std::vector<at::Tensor> values_of(const SmallNet& net) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& each : net->parameters()) values.push_back(each.detach().clone());
  for (const at::Tensor& each : net->buffers()) values.push_back(each.clone());
  return values;
}

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& wanted,
                 const std::string& what) {
  expect(actual.size() == wanted.size(), what + ": as many tensors");
  for (std::size_t i = 0; i < actual.size(); ++i) {
    expect_equal(actual[i], wanted[i], what + ", tensor " + std::to_string(i));
  }
}

double learning_rate(const Optimizer& optimizer) {
  return optimizer.param_groups()[0].options().get_lr();
}

}  // namespace

TEST_CASE("every optimizer that is kept by name goes on as if nothing had been", "[training]") {
  for (const auto& [name, make] : kOptimizers) {
    INFO(name);
    const KeptJob job;
    SmallNet net = make_net();
    const auto optimizer = make(net->parameters());
    auto snapshot = Snapshot::create(nullptr, job.options());
    TrainingState state(net, optimizer.get());
    REQUIRE(!state.load(*snapshot));
    for (std::int64_t step = 0; step < 3; ++step) train_step(*net, *optimizer, 0, step);
    optimizer->param_groups()[0].options().set_lr(0.02);  // as a scheduler does
    state.save(*snapshot, 3, R"({"epoch": 4})");
    for (std::int64_t step = 3; step < 6; ++step) train_step(*net, *optimizer, 0, step);
    const auto wanted = values_of(net);

    SmallNet other = make_net();
    const auto fresh = make(other->parameters());
    torch::manual_seed(99);  // what dropout draws comes from the snapshot
    std::string extra;
    TrainingState again(other, fresh.get());
    REQUIRE(again.load(*snapshot, &extra) == 3);
    REQUIRE(extra == R"({"epoch":4})");
    REQUIRE(learning_rate(*fresh) == 0.02);
    for (std::int64_t step = 3; step < 6; ++step) train_step(*other, *fresh, 0, step);
    expect_same(values_of(other), wanted, name);

    // Over what is there already: an optimizer that has gone on keeps its memory.
    REQUIRE(again.load(*snapshot) == 3);
    for (std::int64_t step = 3; step < 6; ++step) train_step(*other, *fresh, 0, step);
    expect_same(values_of(other), wanted, name + " once more");
    snapshot->close();
  }
}

TEST_CASE("an optimizer that has made no step is loaded as one", "[training]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  SmallNet net = make_net();
  AdamW optimizer(net->parameters());
  TrainingState(net, &optimizer).save(*snapshot, 0);
  train_step(*net, optimizer, 0, 0);
  REQUIRE(!optimizer.state().empty());
  REQUIRE(TrainingState(net, &optimizer).load(*snapshot) == 0);
  REQUIRE(optimizer.state().empty());
  // Without the optimizer, too.
  SmallNet other = make_net();
  other->head->weight.data().zero_();
  REQUIRE(TrainingState(other).load(*snapshot) == 0);
  expect_same(values_of(other), values_of(net), "the module alone");
}

TEST_CASE("memory for the moments is made ready where there is no save", "[training]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  torch::nn::Linear net(1024, 1024);
  AdamW optimizer(net->parameters());
  REQUIRE(!TrainingState(net, &optimizer).load(*snapshot));
  test::wait_until([&] { return snapshot->prepared_bytes() >= 3 * 4 * 1024 * 1024; });
}

namespace {

ShardOptions sharded(const Group& group) {
  ShardOptions options;
  options.shard = group;
  return options;
}

/// With units of its own for the blocks and the head, or one for all.
std::unique_ptr<FullyShardedDataParallel<SmallNetImpl>> shard_net(const SmallNet& net,
                                                                  const Group& group, bool in_units,
                                                                  bool keep_unsharded = false) {
  ShardOptions options = sharded(group);
  options.keep_unsharded = keep_unsharded;
  if (in_units) {
    fully_shard_each(net->blocks, options);
    fully_shard(net->head, options, "head");
  }
  return std::make_unique<FullyShardedDataParallel<SmallNetImpl>>(net, options);
}

Group shared(ProcessGroup& group) {
  return Group(&group, [](ProcessGroup*) {});
}

/// Without what differs from rank to rank: dropout's numbers and the batch norm's averages.
SmallNet make_even_net() {
  SmallNet net = make_net();
  net->eval();
  return net;
}

/// A sharded training of three ranks up to a save at step 2, and its parameters at step 4.
FullState train_on_three(const KeptJob& job, const MakeOptimizer& make) {
  FullState wanted;
  run_group(3, [&](ProcessGroup& group) {
    SmallNet net = make_even_net();
    const auto model = shard_net(net, shared(group), /*in_units=*/true);
    const auto optimizer = make(net->parameters());
    auto snapshot = Snapshot::create(shared(group), job.options());
    TrainingState state(net, optimizer.get());
    // The same batch on all ranks, so that their number does not matter but for rounding.
    for (std::int64_t step = 0; step < 2; ++step) train_step(*model, *optimizer, 0, step);
    state.save(*snapshot, 2, std::to_string(group.rank()));
    for (std::int64_t step = 2; step < 4; ++step) train_step(*model, *optimizer, 0, step);
    FullState full = model->full_state();
    if (group.rank() == 0) wanted = std::move(full);
  });
  return wanted;
}

void expect_close(const FullState& actual, const FullState& wanted, const std::string& what) {
  expect(actual.size() == wanted.size(), what + ": as many tensors");
  for (const auto& [name, tensor] : wanted) {
    // Averages over two ranks and over three round differently.
    expect(torch::allclose(actual.at(name), tensor, 1e-4, 1e-6), what + ": " + name);
  }
}

}  // namespace

TEST_CASE("a sharded training goes on on other ranks, with other units, and whole", "[training]") {
  for (const auto& [name, make] : kOptimizers) {
    INFO(name);
    const KeptJob job;
    const FullState wanted = train_on_three(job, make);
    for (const bool in_units : {true, false}) {
      run_group(2, [&](ProcessGroup& group) {
        SmallNet net = make_even_net();
        const auto model = shard_net(net, shared(group), in_units, /*keep_unsharded=*/in_units);
        {
          const torch::NoGradGuard no_grad;  // what is kept whole here is of other values
          for (at::Tensor& each : net->parameters()) each.zero_();
          model->forward(input_at(0, 0));
        }
        const auto optimizer = make(net->parameters());
        auto snapshot = Snapshot::create(shared(group), job.options());
        std::string extra;
        expect(TrainingState(net, optimizer.get()).load(*snapshot, &extra) == 2, "step 2");
        expect(extra == std::to_string(group.rank()), "this rank's extra");
        for (std::int64_t step = 2; step < 4; ++step) train_step(*model, *optimizer, 0, step);
        expect_close(model->full_state(), wanted, name);
      });
    }
    SmallNet net = make_even_net();
    const auto optimizer = make(net->parameters());
    auto snapshot = Snapshot::create(nullptr, job.options());
    REQUIRE(TrainingState(net, optimizer.get()).load(*snapshot) == 2);
    for (std::int64_t step = 2; step < 4; ++step) train_step(*net, *optimizer, 0, step);
    FullState full;
    for (const auto& item : net->named_parameters()) full[item.key()] = item.value();
    for (const auto& item : net->named_buffers()) full[item.key()] = item.value();
    expect_close(full, wanted, name + " in one process");
    snapshot->close();
  }
}

TEST_CASE("on as many ranks a sharded training goes on bit for bit", "[training]") {
  const KeptJob job;
  const MakeOptimizer& make = kOptimizers[0].second;
  const FullState wanted = train_on_three(job, make);
  run_group(3, [&](ProcessGroup& group) {
    SmallNet net = make_even_net();
    const auto model = shard_net(net, shared(group), /*in_units=*/true);
    const auto optimizer = make(net->parameters());
    auto snapshot = Snapshot::create(shared(group), job.options());
    expect(TrainingState(net, optimizer.get()).load(*snapshot) == 2, "step 2");
    for (std::int64_t step = 2; step < 4; ++step) train_step(*model, *optimizer, 0, step);
    for (const auto& [name, tensor] : model->full_state()) {
      expect_equal(tensor, wanted.at(name), name);
    }
  });
}

TEST_CASE("an AdamW that shares its work keeps whole moments, and takes them up", "[training]") {
  const KeptJob job;
  std::vector<at::Tensor> wanted;
  const auto train = [&](ProcessGroup& group, bool shares, bool resumes) {
    SmallNet net = make_even_net();
    DistributedDataParallel<SmallNetImpl> model(net, shared(group));
    AdamWExtras extras;
    if (shares) extras.shard_over = &model.replica();
    AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2), extras);
    auto snapshot = Snapshot::create(shared(group), job.options());
    TrainingState state(net, &optimizer);
    if (resumes) {
      expect(state.load(*snapshot) == 2, "step 2");
    } else {
      for (std::int64_t step = 0; step < 2; ++step)
        train_step(model, optimizer, group.rank(), step);
      state.save(*snapshot, 2);
    }
    for (std::int64_t step = 2; step < 4; ++step) train_step(model, optimizer, group.rank(), step);
    if (!resumes && group.rank() == 0) wanted = values_of(net);
    if (resumes) expect_same(values_of(net), wanted, shares ? "shared" : "whole");
    if (!resumes) return;
    // Once more, when it is known what this rank owns.
    expect(state.load(*snapshot) == 2, "step 2");
    for (std::int64_t step = 2; step < 4; ++step) train_step(model, optimizer, group.rank(), step);
    expect_same(values_of(net), wanted, "once more");
  };
  run_group(2, [&](ProcessGroup& group) { train(group, /*shares=*/true, /*resumes=*/false); });
  for (const bool shares : {true, false}) {
    run_group(2, [&](ProcessGroup& group) { train(group, shares, /*resumes=*/true); });
  }
}

TEST_CASE("a save of another module or optimizer is refused by name", "[training]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  SmallNet net = make_net();
  AdamW optimizer(net->parameters());
  train_step(*net, optimizer, 0, 0);
  TrainingState(net, &optimizer).save(*snapshot, 1);
  const auto before = values_of(net);

  const auto refusal = [&](const std::shared_ptr<torch::nn::Module>& module, Optimizer* other) {
    return message_of<ArgumentError>([&] { TrainingState(module, other).load(*snapshot); });
  };
  torch::nn::Linear linear(6, 3);
  REQUIRE(contains(refusal(linear.ptr(), nullptr), "which the module has not"));
  struct Larger : SmallNetImpl {
    Larger() { register_parameter("more", torch::ones({2})); }
  };
  REQUIRE(contains(refusal(std::make_shared<Larger>(), nullptr), "'model.more'"));

  torch::optim::Adam adam(net->parameters());
  REQUIRE(contains(refusal(net.ptr(), &adam), "has decoupled_weight_decay = true"));
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
  REQUIRE(contains(refusal(net.ptr(), &sgd), "has no 'momentum', so it is not of an SGD"));
  AdamW backwards(net->parameters(), {}, {.maximize = true});
  TrainingState(net, &backwards).save(*snapshot, 2);
  REQUIRE(contains(refusal(net.ptr(), &optimizer), "has maximize = true"));
  TrainingState(net, &optimizer).save(*snapshot, 3);

  AdamW some(std::vector<at::Tensor>{net->head->weight});
  REQUIRE(contains(refusal(net.ptr(), &some), "which the optimizer's has not"));
  AdamW groups(std::vector<torch::optim::OptimizerParamGroup>{
      torch::optim::OptimizerParamGroup({net->head->weight}),
      torch::optim::OptimizerParamGroup({net->scale})});
  REQUIRE(contains(refusal(net.ptr(), &groups), "1 groups of parameters, this one 2"));
  AdamW foreign(linear->parameters());
  REQUIRE(contains(refusal(net.ptr(), &foreign), "a parameter of shape [3, 6] that the module"));
  const auto save = [&] { TrainingState(net, &foreign).save(*snapshot, 4); };
  REQUIRE(contains(message_of<ArgumentError>(save), "that the module has not"));
  expect_same(values_of(net), before, "nothing has been changed");

  TrainingState(net).save(*snapshot, 5);
  REQUIRE(contains(refusal(net.ptr(), &optimizer), "has no optimizer. Hint: load it with"));
  snapshot->save(6, {SnapshotTensor::whole("x", torch::ones({2}))}, "{}");
  REQUIRE(contains(refusal(net.ptr(), nullptr), "was not saved by a TrainingState"));
}

TEST_CASE("what cannot be kept is refused before anything is saved", "[training]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  SmallNet net = make_net();
  torch::optim::LBFGS lbfgs(net->parameters());
  const auto make = [&] { TrainingState(net, &lbfgs); };
  REQUIRE(contains(message_of<ArgumentError>(make), "cannot be saved by name. Hint: AdamW"));
  const auto none = [] { TrainingState(SmallNet(nullptr)); };
  REQUIRE(contains(message_of<ArgumentError>(none), "TrainingState: the module is null"));
  const auto save = [&] { TrainingState(net).save(*snapshot, 1, "{'epoch': 3}"); };
  REQUIRE(contains(message_of<ArgumentError>(save), "extra is not JSON"));
  REQUIRE(snapshot->versions().empty());
}

TEST_CASE("one rank that cannot save keeps all from it, and is named", "[training]") {
  const KeptJob job;
  run_group(2, [&](ProcessGroup& group) {
    SmallNet net = make_net();
    auto snapshot = Snapshot::create(shared(group), job.options());
    const bool is_wrong = group.rank() == 1;
    const std::string text = message_of<ArgumentError>(
        [&] { TrainingState(net).save(*snapshot, 1, is_wrong ? "?" : "{}"); });
    expect(contains(text, is_wrong ? "extra is not JSON" : "rank 1 could not save step 1"), text);
    expect(snapshot->versions().empty(), "nothing is saved");
  });
}

}  // namespace libddp
