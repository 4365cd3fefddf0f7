// Passes that raise: what comes after them is as if they had not been.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/ddp/delayed_gradients.h"
#include "libddp/ddp/reducer.h"
#include "tests/ddp/three_vectors.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::a_bucket_each;
using test::contains;
using test::expect;
using test::message_of;
using test::three_vectors;
using test::with_groups;

/// Each parameter a bucket of its own, or all in one.
ReducerOptions options_of(bool small) { return small ? a_bucket_each() : ReducerOptions{}; }

/// The gradient of p2 comes first, that of p0 last; each is `scale`.
at::Tensor scaled_loss(const NamedTensors& parameters, double scale) {
  at::Tensor loss = at::zeros({});
  for (const auto& parameter : parameters) loss = loss + (parameter.tensor * scale).sum();
  return loss;
}

bool all_have(const NamedTensors& parameters, double value) {
  for (const auto& [name, tensor] : parameters) {
    const at::Tensor& grad = tensor.grad();
    if (!grad.defined() || !grad.equal(at::full_like(grad, value))) return false;
  }
  return true;
}

void drop_gradients(const NamedTensors& parameters) {
  for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
}

/// Runs a pass that raises before this parameter has its gradient, and clears what it has left.
void fail_at(const at::Tensor& parameter, const at::Tensor& loss, const NamedTensors& parameters) {
  const unsigned hook = parameter.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook's own error"); });
  expect(contains(message_of<std::runtime_error>([&] { loss.backward(); }), "own error"), "fails");
  parameter.remove_hook(hook);
  drop_gradients(parameters);
}

TEST_CASE("a forward before the pass that failed has a whole pass", "[broken_pass]") {
  const bool small = GENERATE(true, false);
  with_groups(2, [&](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto reducer = Reducer::create(parameters, group, options_of(small));
    const double mine = group->rank() + 1;
    for (int step = 0; step < 3; ++step) {
      drop_gradients(parameters);
      const at::Tensor first = scaled_loss(parameters, 10 * mine);
      reducer->prepare_for_backward({first});
      const at::Tensor second = scaled_loss(parameters, mine);
      reducer->prepare_for_backward({second});
      fail_at(parameters[2].tensor, first, parameters);
      second.backward();
      expect(all_have(parameters, 1.5), "averages of the second one's pass");
    }
  });
}

TEST_CASE("no pass goes on where buckets of the last one had been sent", "[broken_pass]") {
  with_groups(2, [&](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto reducer = Reducer::create(parameters, group, options_of(true));
    const at::Tensor first = scaled_loss(parameters, 10);
    reducer->prepare_for_backward({first});
    const at::Tensor second = scaled_loss(parameters, 1);
    reducer->prepare_for_backward({second});
    fail_at(parameters[0].tensor, first, parameters);
    const std::string text = message_of<StateError>([&] { second.backward(); });
    expect(contains(text, "the last backward pass ended early"), text);
  });
}

TEST_CASE("a local pass after one that failed stays local", "[broken_pass]") {
  const bool small = GENERATE(true, false);
  with_groups(2, [&](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto reducer = Reducer::create(parameters, group, options_of(small));
    const double mine = group->rank() + 1;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor failing = scaled_loss(parameters, 10);
      reducer->prepare_for_backward({failing});
      fail_at(parameters[2].tensor, failing, parameters);
      scaled_loss(parameters, mine).backward();
      expect(all_have(parameters, mine), "this rank's own");
      const at::Tensor loss = scaled_loss(parameters, mine);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(all_have(parameters, 2 * 1.5), "the average of both passes");
    }
  });
}

TEST_CASE("a pass that failed takes no part in those of other reducers", "[broken_pass]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto one = Reducer::create(parameters, group, options_of(true));
    const auto other = Reducer::create(parameters, group, options_of(true));
    const double mine = group->rank() + 1;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor failing = scaled_loss(parameters, 10);
      one->prepare_for_backward({failing});
      fail_at(parameters[2].tensor, failing, parameters);
      for (const auto& reducer : {other, one}) {
        drop_gradients(parameters);
        const at::Tensor loss = scaled_loss(parameters, mine);
        reducer->prepare_for_backward({loss});
        loss.backward();
        expect(all_have(parameters, 1.5), "average");
      }
      drop_gradients(parameters);
    }
  });
}

TEST_CASE("delayed gradients are averaged after a pass that failed", "[broken_pass]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const at::Tensor trigger = at::full({8}, 1.0).set_requires_grad(true);
    const auto delayed = DelayedGradients::create({parameters, trigger}, group);
    const double mine = group->rank() + 1;
    delayed->arm(true);
    // The trigger, which no operation lies before, is reached first.
    const at::Tensor first = (scaled_loss(parameters, mine) + trigger).sum();
    const at::Tensor second = (scaled_loss(parameters, mine) + trigger).sum();
    fail_at(parameters[2].tensor, first, parameters);
    expect(trigger.grad().defined(), "the trigger was reached");
    second.backward();
    expect(all_have(parameters, 8 * 1.5), "averages");
  });
}

}  // namespace
}  // namespace libddp
