#include "libddp/activation/checkpoint.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "libddp/activation/checkpoint_error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::message_of;

struct TestBlock : torch::nn::Module {
  TestBlock() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("dropout", dropout);
  }

  at::Tensor forward(at::Tensor x) {
    ++runs;
    return x + dropout(down(at::gelu(up(norm(x)))));
  }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear up{8, 16};
  torch::nn::Linear down{16, 8};
  torch::nn::Dropout dropout{0.3};
  int runs = 0;
};

using Blocks = std::vector<std::shared_ptr<TestBlock>>;

Blocks make_blocks(int depth = 3) {
  at::manual_seed(0);
  Blocks blocks;
  for (int i = 0; i < depth; ++i) blocks.push_back(std::make_shared<TestBlock>());
  return blocks;
}

std::vector<at::Tensor> all_parameters(const Blocks& blocks) {
  std::vector<at::Tensor> parameters;
  for (const auto& block : blocks) {
    for (const at::Tensor& parameter : block->parameters()) parameters.push_back(parameter);
  }
  return parameters;
}

/// Output, the gradients of input and parameters, and the next random number.
template <typename Run>
std::vector<at::Tensor> step(const Blocks& blocks, const Run& run) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({4, 8}).set_requires_grad(true);
  const at::Tensor y = run(x);
  y.pow(2).mean().backward();
  std::vector<at::Tensor> results = {y.detach(), x.grad()};
  for (const at::Tensor& parameter : all_parameters(blocks)) results.push_back(parameter.grad());
  results.push_back(at::rand({2}));
  return results;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool is_equal = a.size() == b.size();
  for (std::size_t i = 0; is_equal && i < a.size(); ++i) is_equal = at::equal(a[i], b[i]);
  return is_equal;
}

at::Tensor checkpointed(const Blocks& blocks, at::Tensor x) {
  for (const auto& b : blocks) {
    x = checkpoint([b](at::Tensor h) { return b->forward(h); }, b->parameters(), x);
  }
  return x;
}

std::vector<at::Tensor> plain_step() {
  const Blocks blocks = make_blocks();
  return step(blocks, [&](at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return x;
  });
}

at::Tensor leaf(std::vector<float> values) { return at::tensor(values).set_requires_grad(true); }

}  // namespace

TEST_CASE("gradients are those without checkpointing, to the bit, and the block runs twice") {
  const Blocks blocks = make_blocks();
  CHECK(equal(step(blocks, [&](at::Tensor x) { return checkpointed(blocks, x); }), plain_step()));
  CHECK(blocks[0]->runs == 2);
}

TEST_CASE("checkpoint_sequential") {
  for (const std::size_t segments : {1, 2, 3}) {
    const Blocks blocks = make_blocks();
    const auto run = [&](at::Tensor x) { return checkpoint_sequential(blocks, segments, x); };
    CHECK(equal(step(blocks, run), plain_step()));
    CHECK(blocks.back()->runs == 1);
    CHECK(blocks.front()->runs == (segments == 1 ? 1 : 2));
  }
  const std::string text = message_of<ArgumentError>([&] {
    checkpoint_sequential(make_blocks(), 4, at::ones({1, 8}));
  });
  CHECK(contains(text, "3 modules do not make 4 segments"));
}

TEST_CASE("modules in torch's holders, whose forward is not const") {
  std::vector<torch::nn::Linear> layers;
  for (int i = 0; i < 3; ++i) layers.emplace_back(4, 4);
  const at::Tensor x = at::ones({2, 4});
  at::Tensor wanted = x;
  for (auto& layer : layers) wanted = layer(wanted);
  CHECK(at::equal(checkpoint_sequential(layers, 3, x), wanted));
  torch::nn::Linear b = layers[0];
  const auto y =
      checkpoint([b](at::Tensor h) mutable { return b->forward(h); }, b->parameters(), x);
  CHECK(at::equal(y, b(x)));
}

TEST_CASE("an undefined tensor is handed through, as for a mask that is not there") {
  const auto block = [](const at::Tensor& x, const at::Tensor& mask) {
    return mask.defined() ? x * mask : x.exp();
  };
  const at::Tensor x = at::ones({2, 8}).set_requires_grad(true);
  checkpoint(block, {}, x, at::Tensor()).sum().backward();
  CHECK(at::equal(x.grad(), x.exp()));
}

TEST_CASE("checkpoints nest") {
  const Blocks blocks = make_blocks();
  const auto run = [&](at::Tensor x) {
    return checkpoint([&](at::Tensor h) { return checkpointed(blocks, h); }, all_parameters(blocks),
                      x);
  };
  CHECK(equal(step(blocks, run), plain_step()));
  CHECK(blocks[0]->runs == 3);
}

TEST_CASE("several tensors in and out, some of them whole numbers or handed through") {
  const at::Tensor x = leaf({1, 2});
  const at::Tensor weight = leaf({3, 4});
  const at::Tensor order = at::tensor({1, 0});
  const auto block = [weight](at::Tensor a, at::Tensor index) {
    return std::make_tuple(a.index_select(0, index) * weight, index + 1, a);
  };
  const auto [product, next, same] = checkpoint(block, {weight}, x, order);
  CHECK(at::equal(next, at::tensor({2, 1})));
  CHECK(!same.is_same(x));
  (product * product + same).sum().backward();
  const at::Tensor expected_x = x.detach().clone().set_requires_grad(true);
  const at::Tensor expected_weight = weight.detach().clone().set_requires_grad(true);
  const at::Tensor expected = expected_x.index_select(0, order) * expected_weight;
  (expected * expected + expected_x).sum().backward();
  CHECK(at::equal(x.grad(), expected_x.grad()));
  CHECK(at::equal(weight.grad(), expected_weight.grad()));
}

TEST_CASE("outputs that share memory give the right gradient, or refuse a change in place") {
  const at::Tensor x = leaf({0, 0});
  const auto twice = [](const at::Tensor& a) {
    const at::Tensor h = a.exp();
    return std::make_tuple(h, h);
  };
  auto [h, g] = checkpoint(twice, {}, x);
  CHECK(h.is_same(g));
  h.mul_(3);
  (h * g).sum().backward();
  CHECK(at::equal(x.grad(), at::tensor({18.F, 18.F})));

  const auto with_view = [](const at::Tensor& a) {
    const at::Tensor made = a.sin();
    return std::make_tuple(made, made.view({2, 1}));
  };
  auto [made, view] = checkpoint(with_view, {}, x);
  CHECK(contains(message_of<c10::Error>([&, view = view] { view.mul_(2); }), "is a view"));
  made.mul_(2);
  const auto use = [&, made = made, view = view] { (made.sum() + view.sum()).backward(); };
  CHECK(contains(message_of<c10::Error>(use), "modified inplace"));

  const at::Tensor weight = leaf({3, 4});
  const at::Tensor handed = checkpoint(
      [weight](const at::Tensor& /*a*/) {
        return weight.view({2, 1});
      },
      {weight}, x);
  CHECK(contains(message_of<c10::Error>([&] { handed.mul_(2); }), "is a view"));

  at::Tensor alone = checkpoint([](const at::Tensor& a) { return a.exp().view({2, 1}); }, {}, x);
  x.mutable_grad().reset();
  alone.mul_(2).sum().backward();
  CHECK(at::equal(x.grad(), at::tensor({2.F, 2.F})));
}

TEST_CASE("a hook on the block's input sees the block's part of the gradient") {
  for (const bool is_leaf : {false, true}) {
    const at::Tensor start = leaf({1, 2});
    const at::Tensor x = is_leaf ? start : start * 1;
    at::Tensor seen;
    const auto block = [&seen](const at::Tensor& a) {
      if (at::GradMode::is_enabled()) {
        a.register_hook([&seen](const at::Tensor& gradient) {
          seen = gradient;
          return gradient * 2;
        });
      }
      return a * a;
    };
    (x + checkpoint(block, {}, x)).sum().backward();
    CHECK(at::equal(seen, at::tensor({2.F, 4.F})));
    CHECK(at::equal(start.grad(), at::tensor({5.F, 9.F})));
  }
}

TEST_CASE("dual tensors of forward-mode AD are refused, as inputs and in the block") {
  const at::Tensor x = leaf({1, 2});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  {
    const at::Tensor dual = at::_make_dual(x, at::ones({2}), static_cast<std::int64_t>(level));
    std::string text = message_of<ArgumentError>(
        [&] { checkpoint([](const at::Tensor& a) { return a * a; }, {}, dual); });
    CHECK(contains(text, "forward-mode AD"));
    text = message_of<ArgumentError>(
        [&] { checkpoint([dual](const at::Tensor& a) { return a * dual; }, {}, x); });
    CHECK(contains(text, "Hint: use the transform within the block"));
    const at::NoGradGuard no_grad;
    CHECK(checkpoint([](const at::Tensor& a) { return a * a; }, {}, dual).defined());
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST_CASE("several backward passes, and gradients of a part") {
  const Blocks blocks = make_blocks(1);
  const at::Tensor x = at::ones({2, 8}).set_requires_grad(true);
  const at::Tensor loss = checkpointed(blocks, x).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  const auto only = torch::autograd::grad({loss}, {blocks[0]->up->weight}, {}, true);
  CHECK(at::equal(only[0], blocks[0]->up->weight.grad()));
  loss.backward();
  CHECK(at::equal(x.grad(), once * 2));
  CHECK(contains(message_of<c10::Error>([&] { loss.backward(); }), "a second time"));
}

TEST_CASE("hooks of parameters run once") {
  const Blocks blocks = make_blocks(1);
  int calls = 0;
  blocks[0]->up->weight.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const at::Tensor x = at::ones({2, 8}).set_requires_grad(true);
  checkpointed(blocks, x).sum().backward();
  CHECK(calls == 1);
}

TEST_CASE("without grad, or with nothing that needs it, the block only runs") {
  const Blocks blocks = make_blocks(1);
  {
    const at::NoGradGuard no_grad;
    CHECK(!checkpointed(blocks, at::ones({2, 8})).requires_grad());
  }
  for (at::Tensor& parameter : blocks[0]->parameters()) parameter.set_requires_grad(false);
  CHECK(!checkpointed(blocks, at::ones({2, 8})).requires_grad());
  CHECK(blocks[0]->runs == 2);
}

TEST_CASE("a gradient that would be lost is an error") {
  const at::Tensor x = leaf({1, 2});
  const at::Tensor weight = leaf({3, 4});
  const auto block = [weight](at::Tensor a) { return a * weight; };
  const at::Tensor forgotten = checkpoint(block, {}, CheckpointOptions{.name = "h.3"}, x);
  std::string text = message_of<CheckpointError>([&] { forgotten.sum().backward(); });
  CHECK(contains(text, "checkpoint of h.3: the block uses a leaf of shape [2]"));
  CHECK(contains(text, "Hint: pass it"));

  const at::Tensor made = weight * 2;
  CHECK_THROWS_AS(checkpoint(block, {made}, x), ArgumentError);
  const at::Tensor hidden = checkpoint([made](at::Tensor a) { return a * made; }, {weight}, x);
  text = message_of<CheckpointError>([&] { hidden.sum().backward(); });
  CHECK(contains(text, "MulBackward1 made outside the block"));
}

TEST_CASE("mistakes are named") {
  const at::Tensor x = leaf({1, 2}) * 1;
  int runs = 0;
  const CheckpointOptions options{.name = "h.3"};
  const at::Tensor changed = checkpoint([](at::Tensor a) { return a * a; }, {}, options, x);
  x.mul_(2);
  std::string text = message_of<CheckpointError>([&] { changed.sum().backward(); });
  CHECK(contains(text, "h.3: input 0 has been modified by an inplace operation"));

  const at::Tensor y = leaf({1, 2});
  const at::Tensor other = checkpoint(
      [&runs](at::Tensor a) { return ++runs == 1 ? a * a : (a * a).sum(); }, {}, options, y);
  text = message_of<CheckpointError>([&] { other.sum().backward(); });
  CHECK(contains(text, "h.3: output 0 of the recomputation has shape []"));

  const at::Tensor square = checkpoint([](at::Tensor a) { return a * a; }, {}, options, y);
  text = message_of<StateError>(
      [&] { torch::autograd::grad({square.sum()}, {y}, {}, std::nullopt, /*create_graph=*/true); });
  CHECK(contains(text, "h.3: gradients of gradients"));
}

TEST_CASE("an error in the block leaves everything usable") {
  const Blocks blocks = make_blocks(1);
  bool is_broken = true;
  const auto block = [&](at::Tensor h) {
    if (is_broken) throw ArgumentError("broken");
    return blocks[0]->forward(h);
  };
  const at::Tensor x = at::ones({2, 8}).set_requires_grad(true);
  CHECK_THROWS_AS(checkpoint(block, blocks[0]->parameters(), x), ArgumentError);
  CHECK(at::GradMode::is_enabled());
  is_broken = false;
  const at::Tensor loss = checkpoint(block, blocks[0]->parameters(), x).sum();
  is_broken = true;
  CHECK_THROWS_AS(loss.backward({}, /*retain_graph=*/true), ArgumentError);
  is_broken = false;
  loss.backward();
  CHECK(x.grad().defined());
  CHECK(blocks[0]->up->weight.grad().defined());
}

}  // namespace libddp
