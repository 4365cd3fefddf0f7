#include "libddp/ddp/bucket_hook.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <stdexcept>
#include <string>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "libddp/base/error.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/reducer.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

/// Answers at once: `factor` times the gradients, or what `fail` throws.
class Scale final : public c10d::CommHookInterface {
 public:
  explicit Scale(double factor, bool fails = false) : factor_(factor), fails_(fails) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    if (fails_) throw std::runtime_error("the hook's own error");
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(bucket.getBuffer() * factor_);
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  double factor_;
  bool fails_;
};

struct Model {
  explicit Model(const Group& group)
      : parameters{{"a", at::full({100}, 1.0).set_requires_grad(true)},
                   {"b", at::full({8}, 2.0).set_requires_grad(true)}},
        reducer(
            Reducer::create(parameters, group,
                            {.limits = {.first_bytes = 32, .cap_bytes = 32, .last_bytes = 32}})) {}
  /// Every gradient is `value` before the exchange.
  void backward(double value) {
    for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    const at::Tensor loss = (parameters[0].tensor.sum() + parameters[1].tensor.sum()) * value;
    reducer->prepare_for_backward({loss});
    loss.backward();
  }
  bool holds(double value) const {
    for (const auto& parameter : parameters) {
      const at::Tensor& grad = parameter.tensor.grad();
      if (!grad.defined() || !grad.equal(at::full_like(grad, value))) return false;
    }
    return true;
  }

  NamedTensors parameters;
  std::shared_ptr<Reducer> reducer;
};

TEST_CASE("a hook's result stands in the gradients", "[hook]") {
  with_groups(2, [](const Group& group) {
    Model model(group);
    model.reducer->register_comm_hook(std::make_shared<Scale>(3.0));
    for (int step = 1; step < 4; ++step) {
      model.backward(step);
      expect(model.holds(3.0 * step), "three times the own gradient");
    }
  });
}

TEST_CASE("compressed gradients are averaged", "[hook]") {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    with_groups(3, [&](const Group& group) {
      Model model(group);
      model.reducer->register_comm_hook(compress_hook(group, dtype));
      for (int step = 0; step < 3; ++step) {
        model.backward(group->rank());
        expect(model.holds(1.0), "average of 0, 1 and 2");
      }
    });
  }
  with_groups(1, [](const Group& group) {
    const auto text = message_of<ArgumentError>([&] { compress_hook(group, at::kFloat); });
    expect(contains(text, "cannot be compressed to Float"), text);
  });
}

TEST_CASE("a rank without data takes part in the others' passes", "[hook]") {
  with_groups(2, [](const Group& group) {
    Model model(group);
    for (int step = 0; step < 3; ++step) {
      model.reducer->set_gradient_scale(step == 2 ? 2.0 : 1.0);
      if (group->rank() == 0) {
        model.backward(4.0);
        expect(model.holds(step == 2 ? 4.0 : 2.0), "zeros came from rank 1");
      } else {
        model.reducer->run_empty_pass();
      }
    }
    model.reducer->set_gradient_scale(1.0);
    model.backward(1.0);
    expect(model.holds(1.0), "both ranks go on");
  });
}

TEST_CASE("a hook that fails on all ranks costs its pass and nothing else", "[hook]") {
  with_groups(2, [](const Group& group) {
    Model model(group);
    model.reducer->register_comm_hook(std::make_shared<Scale>(1.0, true));
    const std::string text = message_of<std::runtime_error>([&] { model.backward(1.0); });
    expect(contains(text, "the hook's own error"), text);
    expect(group->failure() == nullptr, "the group goes on");
    Model again(group);
    again.backward(1.0);
    expect(again.holds(1.0), "another model on it");
  });
}

TEST_CASE("a hook that fails on one rank is told to those that wait for it", "[hook]") {
  with_groups(2, [](const Group& group) {
    Model model(group);
    const bool fails = group->rank() == 1;
    // The other rank's hook waits for this one.
    model.reducer->register_comm_hook(fails ? std::make_shared<Scale>(1.0, true)
                                            : compress_hook(group, at::kHalf));
    std::string text;
    try {
      model.backward(1.0);
    } catch (const std::exception& error) {
      text = error.what();
    }
    expect(
        contains(text, fails ? "the hook's own error" : "communication hook failed for bucket 0"),
        text);
    expect(fails || group->failure() != nullptr, "the group has ended for those that wait");
  });
}

TEST_CASE("hooks are registered once, and in time", "[hook]") {
  with_groups(2, [](const Group& group) {
    Model model(group);
    model.reducer->register_comm_hook(std::make_shared<Scale>(1.0));
    const auto twice = message_of<StateError>(
        [&] { model.reducer->register_comm_hook(std::make_shared<Scale>(1.0)); });
    expect(contains(twice, "can only be called once"), twice);
    Model late(group);
    late.backward(1.0);
    const auto text = message_of<StateError>(
        [&] { late.reducer->register_comm_hook(std::make_shared<Scale>(1.0)); });
    expect(contains(text, "before the first backward pass"), text);
  });
}

}  // namespace
}  // namespace libddp
