#include "libddp/autograd/late_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "tests/support/catch.h"

namespace libddp {
namespace {

/// What register_post_accumulate_grad_hook leaves at a tensor.
class Count final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Count(int& calls) : calls_(calls) {}
  void operator()(const at::Tensor& tensor) override {
    CHECK(tensor.grad().defined());
    ++calls_;
  }

 private:
  int& calls_;
};

void add_hook(const at::Tensor& tensor, int& calls) {
  torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<Count>(calls));
}

at::Tensor ones_leaf() { return at::ones({2}).set_requires_grad(true); }

TEST_CASE("hooks of users wait until they are run", "[late_hooks]") {
  const at::Tensor a = ones_leaf();
  const at::Tensor b = ones_leaf();
  int calls = 0;
  add_hook(a, calls);
  auto late = std::make_unique<LateHooks>(std::vector<at::Tensor>{a, b});
  auto hooks = std::make_unique<AccumulateHooks>(
      std::vector<at::Tensor>{a, b},
      [&](std::size_t index, const at::Tensor&) { late->put_back(index); });
  CHECK((late->has(0) && !late->has(1)));
  (a * b).sum().backward();
  CHECK(calls == 0);
  CHECK(late->has(0));
  late->run(0);
  late->run(1);
  CHECK(calls == 1);

  int others = 0;
  add_hook(b, others);  // later than the first pass
  (a * b).sum().backward();
  CHECK((calls == 1 && others == 0));
  late->run(1);
  CHECK(others == 1);

  hooks = nullptr;
  late = nullptr;
  (a * b).sum().backward();
  CHECK((calls == 2 && others == 2));
}

/// What register_hook leaves at a node.
class CountAtNode final : public torch::autograd::FunctionPostHook {
 public:
  explicit CountAtNode(int& calls) : calls_(calls) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& gradients) override {
    CHECK(gradients.at(0).defined());
    ++calls_;
    return outputs;
  }

 private:
  int& calls_;
};

TEST_CASE("hooks on nodes wait too", "[late_hooks]") {
  const at::Tensor a = ones_leaf();
  const auto node = torch::autograd::impl::grad_accumulator(a);
  int first = 0;
  int second = 0;
  node->add_post_hook(std::make_unique<CountAtNode>(first));
  LateHooks late({a});
  int fired = 0;
  const AccumulateHooks hooks({a}, [&](std::size_t index, const at::Tensor&) {
    late.put_back(index);
    ++fired;
  });
  node->add_post_hook(std::make_unique<CountAtNode>(second));
  (a * 2).sum().backward();
  CHECK((first == 0 && second == 0 && fired == 1));
  CHECK(late.has(0));
  late.run(0);
  CHECK((first == 1 && second == 1 && fired == 1));
  (a * 2).sum().backward();
  late.put_all_back();  // a pass that averages nothing
  CHECK((first == 1 && second == 1 && fired == 2));
  CHECK(node->post_hooks().size() == 3);
}

TEST_CASE("hooks of users come back after a pass that failed", "[late_hooks]") {
  const at::Tensor a = ones_leaf();
  int calls = 0;
  add_hook(a, calls);
  auto late = std::make_unique<LateHooks>(std::vector<at::Tensor>{a});
  const AccumulateHooks hooks(
      {a}, [](std::size_t, const at::Tensor&) { throw std::out_of_range("mine"); });
  CHECK_THROWS_AS((a * 2).sum().backward(), std::out_of_range);
  CHECK_FALSE(late->has(0));
  SECTION("when they are asked for") {
    late->put_all_back();
    CHECK(late->has(0));
  }
  SECTION("at the end") { late = nullptr; }
  CHECK(torch::autograd::impl::post_acc_grad_hooks(a) != nullptr);
  CHECK(calls == 0);
}

}  // namespace
}  // namespace libddp
