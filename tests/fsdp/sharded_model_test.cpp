// Units and the sharded model against a plain model on the whole batch.

#include "libddp/fsdp/sharded_model.h"
#include "libddp/fsdp/flat_parameter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sin.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr int kLayers = 3;

at::Tensor numbers(at::IntArrayRef sizes, double seed) {
  const std::int64_t numel = c10::multiply_integers(sizes);
  return at::sin(at::arange(numel, at::kFloat) * 0.37 + seed).view(sizes);
}

/// Units of layers this wide are averaged each by itself, but for the first and the root.
constexpr int kWide = 190;

/// Linear layers with a ReLU each, and a scale of the root.
struct Net {
  std::vector<NamedTensors> layers;
  NamedTensors root;

  explicit Net(int width = 7) {
    const double scale = 7.0 / width;
    for (int l = 0; l < kLayers; ++l) {
      const int in = l == 0 ? 5 : width;
      layers.push_back({{"weight", leaf(numbers({width, in}, l) * scale)},
                        {"bias", leaf(numbers({width}, l + 9))}});
    }
    root = {{"scale", leaf(numbers({width}, 4))}};
  }
  static at::Tensor leaf(const at::Tensor& values) {
    return values.clone().set_requires_grad(true);
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all{root[0].tensor};
    for (const NamedTensors& layer : layers) {
      for (const auto& [name, tensor] : layer) all.push_back(tensor);
    }
    return all;
  }
  at::Tensor run_layer(int l, const at::Tensor& x) const {
    return at::relu(at::linear(x, layers[l][0].tensor, layers[l][1].tensor));
  }
  at::Tensor forward(at::Tensor x) const {
    for (int l = 0; l < kLayers; ++l) x = run_layer(l, x);
    return x * root[0].tensor;
  }
  /// Plain gradient descent on whatever the parameters show.
  void step() const {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& p : parameters()) {
      if (p.grad().defined()) p.sub_(p.grad() * 0.05);
      p.mutable_grad() = at::Tensor();
    }
  }
};

class Sharded {
 public:
  explicit Sharded(const ShardOptions& options, int width = 7) : net_(width) {
    std::vector<std::shared_ptr<ParamGroup>> units{
        std::make_shared<ParamGroup>("", net_.root, options)};
    for (int l = 0; l < kLayers; ++l) {
      units.push_back(
          std::make_shared<ParamGroup>("layer." + std::to_string(l), net_.layers[l], options));
    }
    model_ = ShardedModel::create(std::move(units), {});
  }

  at::Tensor forward(at::Tensor x) {
    ParamGroup& root = *model_->units()[0];
    model_->before_forward(root);
    for (int l = 0; l < kLayers; ++l) {
      ParamGroup& unit = *model_->units()[l + 1];
      model_->before_forward(unit);
      if (before_layer) before_layer();
      x = net_.run_layer(l, x);
      model_->after_forward(unit, {x});
    }
    x = x * net_.root[0].tensor;
    model_->after_forward(root, {x});
    return x;
  }
  const Net& net() const { return net_; }
  ShardedModel& model() { return *model_; }
  std::function<void()> before_layer;

 private:
  Net net_;
  std::shared_ptr<ShardedModel> model_;
};

at::Tensor batch(int rank, int step) { return numbers({4, 5}, rank * 3.1 + step); }

at::Tensor loss_of(const at::Tensor& y) { return y.pow(2).mean(); }

/// The parameters after training on the batches of all ranks, one after the other.
std::vector<at::Tensor> reference(int world_size, int num_steps, int num_micro = 1, int width = 7) {
  Net net(width);
  for (int step = 0; step < num_steps; ++step) {
    for (int micro = 0; micro < num_micro; ++micro) {
      for (int rank = 0; rank < world_size; ++rank) {
        (loss_of(net.forward(batch(rank, step * num_micro + micro))) / world_size).backward();
      }
    }
    net.step();
  }
  return net.parameters();
}

void expect_whole(Sharded& sharded, const std::vector<at::Tensor>& wanted, double tolerance) {
  sharded.model().show_copies();
  const std::vector<at::Tensor> found = sharded.net().parameters();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    expect(at::allclose(found[i].detach(), wanted[i].detach(), tolerance, tolerance),
           "parameter " + std::to_string(i));
  }
  sharded.model().end_copies(false);
}

void train_on(const std::vector<int>& hosts, bool keeps_unsharded, int width) {
  const int world_size = static_cast<int>(hosts.size());
  const auto wanted = reference(world_size, 4, 1, width);
  run_group_on_hosts(hosts, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this(), .keep_unsharded = keeps_unsharded}, width);
    std::int64_t owned = 0;
    for (const at::Tensor& p : sharded.net().parameters()) owned += p.numel();
    expect(world_size == 1 || owned < width * (5 + 2 * width + 4), "a part is owned");
    for (int step = 0; step < 4; ++step) {
      loss_of(sharded.forward(batch(group.rank(), step))).backward();
      for (const at::Tensor& p : sharded.net().parameters()) {
        expect(p.grad().defined() && p.grad().sizes() == p.sizes(), "shards of gradients");
      }
      sharded.net().step();
    }
    expect_whole(sharded, wanted, 1e-5);
  });
}

}  // namespace

TEST_CASE("a sharded model trains like a plain one", "[sharded_model]") {
  // On one host the array exists once, on several it is gathered.
  const std::vector<std::vector<int>> kHosts{{0}, {0, 0}, {0, 0, 0}, {0, 1}, {0, 1, 0}};
  for (const auto& hosts : kHosts) {
    for (const bool keeps : {false, true}) train_on(hosts, keeps, 7);
    train_on(hosts, false, kWide);
  }
}

TEST_CASE("averages are those of an all-reduce, alone or together", "[sharded_model]") {
  for (const int width : {7, kWide}) {
    run_group(3, [&](ProcessGroup& group) {
      const Net plain(width);
      loss_of(plain.forward(batch(group.rank(), 0))).backward();
      Sharded sharded({.shard = group.shared_from_this()}, width);
      loss_of(sharded.forward(batch(group.rank(), 0))).backward();
      const auto& units = sharded.model().units();
      sharded.model().show_copies(units, {.with_gradients = true});
      for (std::size_t i = 0; i < plain.parameters().size(); ++i) {
        const at::Tensor wanted = plain.parameters()[i].grad();
        group.all_reduce(wanted, {ReduceOp::Avg});
        expect_equal(sharded.net().parameters()[i].grad(), wanted, "gradient");
      }
      sharded.model().end_copies(false);
    });
  }
}

TEST_CASE("small units are averaged by one collective", "[sharded_model]") {
  run_group(2, [&](ProcessGroup& group) {
    const auto collectives_of_a_step = [&](int width) {
      Sharded sharded({.shard = group.shared_from_this()}, width);
      const std::uint64_t before = group.sequence_number();
      loss_of(sharded.forward(batch(group.rank(), 0))).backward();
      return group.sequence_number() - before;
    };
    expect(collectives_of_a_step(7) == 3, "two barriers, and one average");
    expect(collectives_of_a_step(kWide) == 5, "two units alone, the others together");
  });
}

TEST_CASE("the memory of gradients goes with the last of them", "[sharded_model]") {
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this()});
    const auto has_block = [&](std::size_t unit) {
      return sharded.model().units()[unit]->flats()[0]->gradient().has_memory();
    };
    const auto run = [&](int step) { return loss_of(sharded.forward(batch(group.rank(), step))); };
    run(0).backward();
    const at::Tensor kept = sharded.net().parameters()[0].grad();
    const at::Tensor copy = kept.clone();
    sharded.net().step();
    expect(has_block(0) != has_block(1), "what somebody has kept, and nothing else");
    const at::Tensor loss = run(1);
    expect(has_block(0) != has_block(1), "as before");
    loss.backward();
    expect(has_block(1) && !sharded.net().parameters()[0].grad().is_same(kept), "new gradients");
    expect_equal(kept, copy, "a gradient that somebody has kept");
    const at::Tensor last = run(2);
    expect(has_block(1), "gradients are there");
    for (const at::Tensor& p : sharded.net().parameters()) p.mutable_grad() = at::Tensor();
    last.backward();  // they went after the forward
    expect(sharded.net().parameters()[0].grad().defined(), "gradients again");
  });
}

TEST_CASE("gradients are out of sight while a unit is whole", "[sharded_model]") {
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this()});
    loss_of(sharded.forward(batch(group.rank(), 0))).backward();
    ShardedModel& model = sharded.model();
    ParamGroup& unit = *model.units()[1];
    const at::Tensor parameter = sharded.net().layers[0][0].tensor;
    const at::Tensor grad = parameter.grad();
    const c10::NoGradGuard no_grad;
    for (const bool fails : {false, true}) {
      model.before_forward(*model.units()[0]);
      model.before_forward(unit);
      expect(!parameter.grad().defined(), "no shard beside a whole tensor");
      fails ? model.forward_failed(unit, "it throws") : model.after_forward(unit, {});
      model.forward_failed(*model.units()[0], "it throws");
      expect(parameter.grad().is_same(grad), "the same gradient again");
    }
  });
}

TEST_CASE("without sharding every rank keeps everything", "[sharded_model]") {
  const auto wanted = reference(2, 3);
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.replicate = group.shared_from_this()});
    for (int step = 0; step < 3; ++step) {
      loss_of(sharded.forward(batch(group.rank(), step))).backward();
      sharded.net().step();
    }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      expect(at::allclose(sharded.net().parameters()[i], wanted[i], 1e-5, 1e-6), "equal");
    }
  });
}

TEST_CASE("gradients add up over passes, averaged or not", "[sharded_model]") {
  const auto wanted = reference(2, 2, 3);
  for (const bool syncs_each : {false, true}) {
    run_group(2, [&](ProcessGroup& group) {
      Sharded sharded({.shard = group.shared_from_this()});
      for (int step = 0; step < 2; ++step) {
        for (int micro = 0; micro < 3; ++micro) {
          sharded.model().set_sync(syncs_each || micro == 2);
          loss_of(sharded.forward(batch(group.rank(), step * 3 + micro))).backward();
        }
        sharded.net().step();
      }
      expect_whole(sharded, wanted, 1e-5);
    });
  }
}

TEST_CASE("evaluation leaves shards behind", "[sharded_model]") {
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this()});
    const auto shape = sharded.net().parameters()[1].sizes().vec();
    {
      const c10::NoGradGuard no_grad;
      const at::Tensor y = sharded.forward(batch(0, 0));
      expect(at::allclose(y, Net().forward(batch(0, 0)), 1e-6, 1e-6), "the same values");
    }
    expect(sharded.net().parameters()[1].sizes().vec() == shape, "shards after the forward");
  });
}

TEST_CASE("nobody changes parameters that an evaluation still reads", "[sharded_model]") {
  const bool with_gradients = GENERATE(false, true);
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this()});
    loss_of(sharded.forward(batch(0, 0))).backward();
    const at::Tensor wanted = Net().forward(batch(0, 1));
    const c10::AutoGradMode mode(with_gradients);
    sharded.before_layer = [&] {
      if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    };
    const at::Tensor y = sharded.forward(batch(0, 1));
    sharded.net().step();
    expect(at::allclose(y, wanted, 1e-6, 1e-6), "the values before the step");
  });
}

TEST_CASE("low precision in the computation, full precision in the optimizer", "[sharded_model]") {
  const auto wanted = reference(2, 3);
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this(), .param_dtype = at::kBFloat16});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor y = sharded.forward(batch(group.rank(), step).to(at::kBFloat16));
      expect(y.scalar_type() == at::kBFloat16, "computes in bf16");
      loss_of(y.to(at::kFloat)).backward();
      for (const at::Tensor& p : sharded.net().parameters()) {
        expect(p.scalar_type() == at::kFloat && p.grad().scalar_type() == at::kFloat, "fp32");
      }
      sharded.net().step();
    }
    expect_whole(sharded, wanted, 3e-2);
  });
}

TEST_CASE("a parameter cannot be wrapped twice", "[sharded_model]") {
  const Net net;
  const ParamGroup first("first", net.root, {});
  try {
    const ParamGroup second("second", net.root, {});
    FAIL("not refused");
  } catch (const ArgumentError& error) {
    CHECK(contains(error.what(), "unit 'second': parameter 'scale' belongs to a sharded unit"));
  }
}

TEST_CASE("models that differ between ranks are refused on all", "[sharded_model]") {
  run_group(2, [](ProcessGroup& group) {
    const NamedTensors parameters{{"w", Net::leaf(numbers({3 + group.rank(), 2}, 0))}};
    const std::string text = message_of<ArgumentError>(
        [&] { ParamGroup("u", parameters, {.shard = group.shared_from_this()}); });
    expect(contains(text, "'w'") && contains(text, "[3, 2]") && contains(text, "[4, 2]"), text);
  });
}

TEST_CASE("a forward that fails leaves a model that goes on", "[sharded_model]") {
  const auto wanted = reference(2, 1);
  run_group(2, [&](ProcessGroup& group) {
    Sharded sharded({.shard = group.shared_from_this()});
    ShardedModel& model = sharded.model();
    model.before_forward(*model.units()[0]);
    model.before_forward(*model.units()[1]);
    model.forward_failed(*model.units()[1], "it throws");
    model.forward_failed(*model.units()[0], "it throws");
    loss_of(sharded.forward(batch(group.rank(), 0))).backward();
    sharded.net().step();
    expect_whole(sharded, wanted, 1e-5);
  });
}
