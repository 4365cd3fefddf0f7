// The face for LibTorch's modules against plain modules on the batches of all ranks.

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/fully_sharded_data_parallel.h"
#include "libddp/fsdp/sharded_model.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/torch_group_fixture.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::run_group;

/// A Sequential, a part that is called by hand, and a parameter of its own.
struct ShardedNetImpl : torch::nn::Module {
  ShardedNetImpl() {
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
    scale = register_parameter("scale", torch::ones({6}));
    offset = register_buffer("offset", torch::full({1}, 0.5));
  }

  at::Tensor forward(const at::Tensor& x) {
    if (fails) throw std::runtime_error("no forward today\nmore");
    const at::Tensor y = norm(blocks->forward(x)) * scale;
    return (by_hand ? y.matmul(head->weight.t()) : sharded_forward(head, y)) + offset;
  }

  torch::nn::Sequential blocks{torch::nn::Linear(5, 6), torch::nn::Tanh(), torch::nn::Linear(6, 6)};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  torch::nn::Linear head{6, 3};
  at::Tensor scale;
  at::Tensor offset;
  bool fails = false;
  /// The head's weight is used while its unit does not run.
  bool by_hand = false;
};
TORCH_MODULE(ShardedNet);

using ShardedNetModel = FullyShardedDataParallel<ShardedNetImpl>;

/// Values that depend on the parameter's name only.
ShardedNet make_net(double seed = 0) {
  ShardedNet net;
  const torch::NoGradGuard no_grad;
  for (auto& item : net->named_parameters()) {
    const auto numel = item.value().numel();
    seed += 1;
    item.value().copy_(
        torch::sin(torch::arange(numel, torch::kFloat) * 0.7 + seed).view(item.value().sizes()));
  }
  return net;
}

at::Tensor input_at(int rank, int step) {
  return torch::sin(torch::arange(20, torch::kFloat) * 0.3 + rank * 5 + step).view({4, 5});
}

std::unique_ptr<ShardedNetModel> shard_net(const ShardedNet& net, const ShardOptions& options) {
  fully_shard_each(net->blocks, options);
  fully_shard(net->head, options, "head");
  return std::make_unique<ShardedNetModel>(net, options);
}

at::Tensor loss_at(const at::Tensor& y) { return y.to(torch::kFloat).pow(2).mean(); }

/// The state after training on the batches of all ranks.
FullState plain_state(int world_size, int num_steps, double max_norm = 0) {
  ShardedNet net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < world_size; ++rank) {
      (loss_at(net->forward(input_at(rank, step))) / world_size).backward();
    }
    if (max_norm > 0) clip_grad_norm(net->parameters(), max_norm);
    optimizer.step();
  }
  FullState state;
  for (const auto& item : net->named_parameters()) state[item.key()] = item.value().detach();
  for (const auto& item : net->named_buffers()) state[item.key()] = item.value();
  return state;
}

void expect_state(const FullState& found, const FullState& wanted, double tolerance = 1e-5) {
  expect(found.size() == wanted.size(), "the same names");
  for (const auto& [name, tensor] : wanted) {
    expect(found.contains(name), name);
    expect(torch::allclose(found.at(name), tensor, tolerance, tolerance), name);
  }
}

std::int64_t numel_of(const torch::nn::Module& module) {
  std::int64_t numel = 0;
  for (const at::Tensor& p : module.parameters()) numel += p.numel();
  return numel;
}

}  // namespace

TEST_CASE("a sharded LibTorch module trains like a plain one", "[fully_shard]") {
  const FullState wanted = plain_state(2, 4);
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);  // before or after
    const std::int64_t all = numel_of(*net);
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    at::Tensor owned = torch::tensor({numel_of(*net)});
    group.all_reduce(owned);
    expect(owned.item<std::int64_t>() == all, "every element has one owner");
    expect(model->model().units().size() == 4, "root, two elements, head");
    expect(net->named_parameters().contains("blocks.0.weight"), "names stay");
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      loss_at(model->forward(input_at(group.rank(), step))).backward();
      optimizer.step();
    }
    expect_state(model->full_state(), wanted);
  });
}

TEST_CASE("a LibTorch module without sharding options is replicated", "[fully_shard]") {
  const FullState wanted = plain_state(2, 2);
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    FullyShardedDataParallel model(net, {.replicate = group.shared_from_this()});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      loss_at(model.forward(input_at(group.rank(), step))).backward();
      optimizer.step();
    }
    expect_state(model.full_state(), wanted);
  });
}

TEST_CASE("norms of sharded gradients are those of the whole model", "[fully_shard]") {
  for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    ShardedNet plain = make_net();
    for (int rank = 0; rank < 2; ++rank) {
      (loss_at(plain->forward(input_at(rank, 0))) / 2).backward();
    }
    at::Tensor other = torch::ones({3}).requires_grad_();
    other.mutable_grad() = torch::full({3}, 0.2);
    auto parameters = plain->parameters();
    parameters.push_back(other);
    const at::Tensor wanted = clip_grad_norm(parameters, 0.1, type);
    run_group(2, [&](ProcessGroup& group) {
      ShardedNet net = make_net();
      const auto model = shard_net(net, {.shard = group.shared_from_this()});
      loss_at(model->forward(input_at(group.rank(), 0))).backward();
      auto mixed = net->parameters();
      at::Tensor mine = torch::ones({3}).requires_grad_();
      mine.mutable_grad() = torch::full({3}, 0.2);
      mixed.push_back(mine);
      mixed.push_back(net->scale);  // once more, as LibTorch lists what has two names
      expect(torch::allclose(clip_grad_norm(mixed, 0.1, type), wanted), "the norm");
      expect(torch::allclose(mine.grad(), other.grad()), "scaled");
      expect(torch::allclose(clip_grad_norm(mixed, 9.0, type), torch::full({}, 0.1), 1e-3),
             "after");
    });
  }
}

TEST_CASE("norms of half precision are float32's", "[fully_shard]") {
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    net->to(torch::kBFloat16);
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    loss_at(model->forward(input_at(group.rank(), 0).to(torch::kBFloat16))).backward();
    at::Tensor sum = torch::zeros({}, torch::kDouble);
    for (const at::Tensor& each : net->parameters()) {
      if (each.grad().defined()) sum += each.grad().to(torch::kDouble).pow(2).sum();
    }
    group.all_reduce(sum);
    const at::Tensor norm = clip_grad_norm(net->parameters(), 1e9);
    expect(norm.scalar_type() == torch::kFloat, "dtype");
    expect(torch::allclose(norm.to(torch::kDouble), sum.sqrt(), 1e-6), "norm");
  });
}

TEST_CASE("norms are over experts that only some ranks have", "[fully_shard]") {
  run_group(4, [&](ProcessGroup& group) {
    const int half = group.rank() / 2;
    const std::vector<int> ranks{2 * half, 2 * half + 1};
    ShardedNet net = make_net();
    const Group own = group.split(ranks, "experts " + std::to_string(half));
    fully_shard(net->head, {.shard = own}, "head");  // another one in each half
    ShardedNetModel model(net, {.shard = group.shared_from_this()});
    loss_at(model.forward(input_at(group.rank(), 0))).backward();
    // What each rank has, whichever parameter it is of.
    at::Tensor sum = torch::zeros({});
    for (const at::Tensor& each : net->parameters()) sum += each.grad().pow(2).sum();
    group.all_reduce(sum);
    expect(torch::allclose(model.clip_grad_norm(0.5), sum.sqrt()), "the norm of all experts");
    sum.zero_();
    for (const at::Tensor& each : net->parameters()) sum += each.grad().pow(2).sum();
    group.all_reduce(sum);
    expect(torch::allclose(sum.sqrt(), torch::full({}, 0.5), 1e-4), "by one factor");
  });
}

TEST_CASE("a rank without gradients takes part in norms", "[fully_shard]") {
  for (const double type : {2.0, std::numeric_limits<double>::infinity()}) {
    run_group(2, [&](ProcessGroup& group) {
      ShardedNet net = make_net();
      const auto model = shard_net(net, {.shard = group.shared_from_this()});
      loss_at(model->forward(input_at(group.rank(), 0))).backward();
      const at::Tensor norm = torch::zeros({2});
      if (group.rank() == 0) {
        net->zero_grad();
      } else {
        std::vector<at::Tensor> own;
        for (const at::Tensor& p : net->parameters()) own.push_back(p.grad().flatten());
        norm[0] = torch::linalg_vector_norm(torch::cat(own), type);
      }
      norm[1] = clip_grad_norm(net->parameters(), 0.1, type);
      const at::Tensor wanted = norm[0].clone().reshape({1});
      group.all_reduce(wanted, {ReduceOp::Sum});
      expect(torch::allclose(norm[1], wanted[0]), "that of the other rank's parts");
    });
  }
}

TEST_CASE("passes under no_sync add up", "[fully_shard]") {
  ShardedNet plain = make_net();
  for (int step = 0; step < 2; ++step) {
    for (int rank = 0; rank < 2; ++rank) {
      (loss_at(plain->forward(input_at(rank, step))) / 2).backward();
    }
  }
  const at::Tensor wanted = clip_grad_norm(plain->parameters(), 1.0);
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const auto whole_scale = net->scale.numel();
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    {
      const auto guard = model->no_sync();
      loss_at(model->forward(input_at(group.rank(), 5))).backward();
      net->zero_grad();  // and none of it comes back
      loss_at(model->forward(input_at(group.rank(), 0))).backward();
      expect(net->scale.grad().numel() == whole_scale, "not averaged yet");
    }
    loss_at(model->forward(input_at(group.rank(), 1))).backward();
    expect(torch::allclose(model->clip_grad_norm(1.0), wanted), "the sum of both");
  });
}

TEST_CASE("low precision converts inputs of every unit", "[fully_shard]") {
  const FullState wanted = plain_state(2, 2);
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const ShardOptions options{.shard = group.shared_from_this(),
                               .param_dtype = torch::kBFloat16,
                               .reduce_dtype = torch::kFloat};
    const auto model = shard_net(net, options);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      loss_at(model->forward(input_at(group.rank(), step))).backward();
      optimizer.step();
    }
    const FullState state = model->full_state();
    expect(state.at("head.weight").scalar_type() == torch::kFloat, "full precision");
    expect_state(state, wanted, 3e-2);
  });
}

TEST_CASE("full states go round, also through files", "[fully_shard]") {
  const FullState wanted = plain_state(1, 1);
  const test::TemporaryFolder folder;
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    model->load_full_state(wanted);
    expect_state(model->full_state(), wanted, 0);
    const std::string path = folder.path() + "/" + std::to_string(group.rank());
    model->with_full_params([&] { torch::save(net, path); });

    ShardedNet plain = make_net(5);
    torch::load(plain, path);
    expect(torch::equal(plain->head->weight, wanted.at("head.weight")), "a plain module's file");
    ShardedNet other = make_net(9);
    const auto again = shard_net(other, {.shard = group.shared_from_this()});
    again->with_full_params([&] { torch::load(other, path); }, /*writeback=*/true);
    expect_state(again->full_state(), wanted, 0);
    loss_at(again->forward(input_at(0, 0))).backward();
  });
}

TEST_CASE("states that do not fit are refused by name", "[fully_shard]") {
  FullState state = plain_state(1, 0);
  state.erase("scale");
  state["head.bias"] = torch::ones({4});
  state["extra"] = torch::ones({1});
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    const auto text = message_of<ArgumentError>([&] { model->load_full_state(state); });
    expect(contains(text, "'scale' is missing") && contains(text, "'extra' is not in the model") &&
               contains(text, "'head.bias' has the shape [4], the model [3]"),
           text);
    const auto resize = [&] {
      model->with_full_params([&] { net->scale.set_data(torch::ones({7})); }, true);
    };
    const auto why = message_of<StateError>(resize);
    expect(contains(why, "'scale'") && contains(why, "[7]") && contains(why, "[6]"), why);
    expect_state(model->full_state(), plain_state(1, 0), 0);
  });
}

TEST_CASE("options that make no sense are named", "[fully_shard]") {
  run_group(2, [&](ProcessGroup& group) {
    const Group all = group.shared_from_this();
    const auto told = [](const ShardOptions& options) {
      return message_of<ArgumentError>(
          [&] { fully_shard(torch::nn::Linear(4, 4), options, "up"); });
    };
    const auto one = told({.shard = all, .replicate = all});
    expect(contains(one, "unit 'up': shard and replicate are one group"), one);
    const auto whole = told({.shard = all, .param_dtype = at::kInt});
    expect(contains(whole, "unit 'up': param_dtype is Int"), whole);
  });
}

TEST_CASE("a state that one rank cannot load is loaded on none", "[fully_shard]") {
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    const FullState before = model->full_state();
    FullState state = before;
    for (auto& [name, tensor] : state) tensor = tensor + 1;
    if (group.rank() == 1) {
      state.erase("scale");
      const auto text = message_of<ArgumentError>([&] { model->load_full_state(state); });
      expect(contains(text, "'scale' is missing"), text);
    } else {
      const auto text = message_of<PeerError>([&] { model->load_full_state(state); });
      expect(contains(text, "state of another rank does not fit"), text);
    }
    expect_state(model->full_state(), before, 0);
    const auto change = [&] {
      const torch::NoGradGuard no_grad;
      net->scale.fill_(7);
      if (group.rank() == 0) throw std::runtime_error("not today");
    };
    const auto with_changes = [&] { model->with_full_params(change, /*writeback=*/true); };
    const auto text = group.rank() == 0 ? message_of<std::runtime_error>(with_changes)
                                        : message_of<PeerError>(with_changes);
    expect(!text.empty(), "both are told");
    expect_state(model->full_state(), before, 0);
    loss_at(model->forward(input_at(group.rank(), 0))).backward();
  });
}

TEST_CASE("a forward that throws leaves a model that goes on", "[fully_shard]") {
  const FullState wanted = plain_state(2, 1);
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    net->fails = true;
    const auto text =
        message_of<std::runtime_error>([&] { model->forward(input_at(group.rank(), 0)); });
    expect(contains(text, "no forward today"), text);
    net->fails = false;
    loss_at(model->forward(input_at(group.rank(), 0))).backward();
    optimizer.step();
    expect_state(model->full_state(), wanted);
  });
}

TEST_CASE("weights are no matrices while their unit does not run", "[fully_shard]") {
  run_group(2, [&](ProcessGroup& group) {
    ShardedNet net = make_net();
    const auto model = shard_net(net, {.shard = group.shared_from_this()});
    const auto shape = net->head->weight.sizes().vec();
    net->by_hand = true;
    for (const bool with_gradients : {false, true}) {
      const torch::AutoGradMode mode(with_gradients);
      message_of<c10::Error>([&] { model->forward(input_at(0, 0)); });
      expect(net->head->weight.sizes() == shape, "rows again");
    }
    net->by_hand = false;
    loss_at(model->forward(input_at(group.rank(), 0))).backward();
    expect(net->head->weight.grad().sizes() == shape, "gradient");
  });
}

TEST_CASE("a forward that writes into a parameter that ranks share is told so", "[fully_shard]") {
  run_group(2, [&](ProcessGroup& group) {
    const auto options = torch::nn::EmbeddingOptions(9, 4).max_norm(1.0);
    torch::nn::Sequential net{torch::nn::Embedding(options)};
    FullyShardedDataParallel model(net, {.shard = group.shared_from_this()});
    const at::Tensor tokens = torch::arange(9);
    const auto text = message_of<ArgumentError>([&] { model.forward(tokens); });
    expect(contains(text, "the forward has written into parameter '0.weight'"), text);
  });
  // Alone, the rows stay as they are after it.
  torch::nn::Sequential net{torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).max_norm(1.0))};
  FullyShardedDataParallel model(net, {});
  const at::Tensor rows = model.forward(torch::arange(9));
  REQUIRE(rows.norm(2, {1}).max().item<float>() < 1.001f);
}

TEST_CASE("mistakes with LibTorch modules are named", "[fully_shard]") {
  ShardedNet net = make_net();
  fully_shard(net->head, {}, "head");
  const auto alone = message_of<StateError>([&] { net->forward(input_at(0, 0)); });
  CHECK(contains(alone, "module 'head' is sharded, but the model around it is not wrapped"));
  const auto twice = message_of<ArgumentError>([&] { fully_shard(net->head, {}, "head"); });
  CHECK(contains(twice, "module 'head' is wrapped already"));
  fully_shard_each(net->blocks, {});
  const auto each = message_of<ArgumentError>([&] { fully_shard_each(net->blocks, {}); });
  CHECK(contains(each, "element 0"));
  {
    ShardedNetModel model(net, {});
    CHECK(contains(message_of<ArgumentError>([&] { ShardedNetModel(net, {}); }), "already"));
    const auto nowhere = message_of<ArgumentError>([&] { model.rejoin(nullptr); });
    CHECK(contains(nowhere, "the process group is null"));
    model.eval();
    CHECK(!model->is_training());
  }
  const std::shared_ptr<torch::nn::LinearImpl> nothing;
  const auto told = message_of<ArgumentError>([&] { FullyShardedDataParallel(nothing, {}); });
  CHECK(contains(told, "the module is null"));
  // The model has ended: its parts are plain modules again.
  CHECK(net->forward(input_at(0, 0)).defined());
}

}  // namespace libddp
