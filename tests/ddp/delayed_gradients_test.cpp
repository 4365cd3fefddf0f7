#include "libddp/ddp/delayed_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/linear.h>

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

at::Tensor leaf(double value) { return at::full({4}, value).set_requires_grad(true); }

bool has_gradient_of(const at::Tensor& parameter, double value) {
  return parameter.grad().equal(at::full({4}, value));
}

TEST_CASE("gradients add up until the trigger has one", "[delayed]") {
  with_groups(2, [](const Group& group) {
    const at::Tensor a = leaf(1), b = leaf(2), trigger = leaf(3);
    const auto delayed = DelayedGradients::create({{{"a", a}, {"b", b}}, trigger}, group);
    const double mine = group->rank() + 1;
    for (int pass = 1; pass <= 3; ++pass) {
      (a * mine).sum().backward();
      expect(has_gradient_of(a, mine * pass), "local");
    }
    (a * mine + trigger).sum().backward();
    expect(has_gradient_of(a, 4 * 1.5), "the average of all four passes");
    expect(!b.grad().defined(), "nobody has used it");
    expect(has_gradient_of(trigger, 1), "the trigger itself is not averaged here");
  });
}

TEST_CASE("a pass that does not synchronise stays local", "[delayed]") {
  with_groups(2, [](const Group& group) {
    const at::Tensor a = leaf(1);
    const auto delayed = DelayedGradients::create({{{"a", a}}, a}, group);
    const double mine = group->rank() + 1;
    delayed->arm(false);
    (a * mine).sum().backward();
    expect(has_gradient_of(a, mine), "local");
    delayed->arm(true);
    (a * mine).sum().backward();
    expect(has_gradient_of(a, 3), "the average of both");
  });
}

TEST_CASE("delayed parameters of a wrapped module", "[delayed]") {
  with_groups(2, [](const Group& group) {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel model(net, group, {}, {{{"bias", net->bias}}, net->weight});
    model.forward(at::full({1, 2}, group->rank() + 1.0)).sum().backward();
    expect(net->weight.grad().equal(at::full({2, 2}, 1.5)), "by the reducer");
    expect(net->bias.grad().equal(at::full({2}, 1.0)), "delayed");
  });
}

TEST_CASE("only trained parameters can be delayed", "[delayed]") {
  with_groups(1, [](const Group& group) {
    const at::Tensor frozen = at::full({4}, 1.0);
    std::string text = message_of<ArgumentError>([&] {
      DelayedGradients::create({{{"frozen", frozen}}, leaf(1)}, group);
    });
    expect(contains(text, "'frozen' does not require a gradient"), text);
    text = message_of<ArgumentError>([&] {
      DelayedGradients::create({{{"a", leaf(1)}}, frozen}, group);
    });
    expect(contains(text, "param_to_hook_all_reduce does not require a gradient"), text);
  });
}

}  // namespace
}  // namespace libddp
