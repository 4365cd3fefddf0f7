#include "libddp/ddp/low_precision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <stdexcept>

#include "libddp/base/error.h"
#include "libddp/ddp/distributed_data_parallel.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

TEST_CASE("the same parameter shows both precisions", "[low_precision]") {
  const at::Tensor weight = at::full({3}, 1.0 / 3).set_requires_grad(true);
  const at::Tensor index = at::arange(3);
  const at::Tensor full = weight.detach().clone();
  LowPrecisionParameters parameters({{"weight", weight}, {"index", index}}, at::kBFloat16);
  int num_changes = 0;
  parameters.on_change([&] { ++num_changes; });
  CHECK(parameters.lower());
  CHECK_FALSE(parameters.lower());
  CHECK(weight.scalar_type() == at::kBFloat16);
  CHECK(weight.detach().equal(full.to(at::kBFloat16)));
  CHECK(index.scalar_type() == at::kLong);
  parameters.raise();
  parameters.raise();
  CHECK(weight.detach().equal(full));
  CHECK(num_changes == 2);
}

TEST_CASE("parameters are whole again after a backward pass that failed", "[low_precision]") {
  const bool sync = GENERATE(true, false);
  with_groups(1, [&](const Group& group) {
    const at::Tensor weight = at::ones({3}).set_requires_grad(true);
    const at::Tensor other = at::ones({3}).set_requires_grad(true);
    ReplicatedModel replica({{"w", weight}}, {}, group,
                            {.mixed_precision = {.param_dtype = at::kBFloat16}});
    const auto forward = [&] {
      replica.before_forward();
      const at::Tensor output = weight * other;
      replica.after_forward({output}, sync);
      return output.sum();
    };
    const at::Tensor failing = forward();
    const unsigned hook = other.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook's own error"); });
    expect(contains(message_of<std::runtime_error>([&] { failing.backward(); }), "own error"),
           "fails");
    other.remove_hook(hook);
    expect(weight.scalar_type() == at::kFloat, "as it was before the forward");
    weight.mutable_grad() = at::Tensor();
    const c10::NoGradGuard no_grad;
    weight.fill_(5);
    {
      const c10::AutoGradMode with_grad(true);
      forward().backward();
    }
    expect(weight.detach().equal(at::full({3}, 5.0)), "what the script has written stays");
    expect(weight.grad().equal(at::ones({3})), "gradients as ever");
  });
}

TEST_CASE("hooks on an input that is handed through do not pile up", "[low_precision]") {
  with_groups(1, [](const Group& group) {
    const at::Tensor weight = at::ones({3}).set_requires_grad(true);
    const at::Tensor input = at::ones({3}).set_requires_grad(true);
    ReplicatedModel replica({{"w", weight}}, {}, group,
                            {.mixed_precision = {.param_dtype = at::kBFloat16}});
    for (int pass = 0; pass < 3; ++pass) {
      replica.before_forward();
      replica.after_forward({input}, false);
    }
    const auto leaf = torch::autograd::impl::grad_accumulator(input);
    expect(leaf->pre_hooks().size() == 1, "one, of the last forward");
    input.sum().backward();
    expect(weight.scalar_type() == at::kFloat, "it has raised the parameters");
  });
}

TEST_CASE("parameters compute in half or bfloat16 only", "[low_precision]") {
  const std::string text =
      message_of<ArgumentError>([] { LowPrecisionParameters({}, at::kDouble); });
  CHECK(contains(text, "mixed precision cannot compute in Double"));
}

TEST_CASE("a model trains in mixed precision", "[low_precision]") {
  with_groups(2, [](const Group& group) {
    torch::nn::Linear net(4, 2);
    DistributedDataParallel model(
        net, group,
        {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor output = model.forward(at::full({1, 4}, group->rank() + 1.0));
      expect(output.scalar_type() == at::kBFloat16, "the module computes in bfloat16");
      output.sum().backward();
      expect(net->weight.scalar_type() == at::kFloat, "full precision after backward");
      expect(net->weight.grad().equal(at::full({2, 4}, 1.5)), "average over the ranks");
      optimizer.step();
    }
    expect(message_of<c10::Error>([&] { model.forward(at::ones({1, 3})); }).size() > 0, "throws");
    expect(net->weight.scalar_type() == at::kFloat, "full precision after a failed forward");
  });
}

}  // namespace
}  // namespace libddp
