#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/autograd/accumulator.h"
#include "libddp/autograd/after_backward.h"
#include "libddp/autograd/graph_task.h"
#include "libddp/base/first_line.h"
#include "tests/support/catch.h"

namespace libddp {
namespace {

at::Tensor leaf() { return at::ones({2}).set_requires_grad(true); }

TEST_CASE("a hook tells once per pass which gradient is there", "[hooks]") {
  const at::Tensor a = leaf();
  const at::Tensor b = leaf();
  std::vector<std::size_t> fired;
  auto hooks = std::make_unique<AccumulateHooks>(std::vector<at::Tensor>{a, b},
                                                 [&](std::size_t i, const at::Tensor&) {
                                                   CHECK((i == 0 ? a : b).grad().defined());
                                                   fired.push_back(i);
                                                 });
  (a * a + a).sum().backward();
  CHECK(fired == std::vector<std::size_t>{0});
  (a * b).sum().backward();
  CHECK(fired.size() == 3);

  hooks = nullptr;
  (a * b).sum().backward();
  CHECK(fired.size() == 3);
}

TEST_CASE("what a hook throws comes out of backward", "[hooks]") {
  const at::Tensor a = leaf();
  const AccumulateHooks hooks(
      {a}, [](std::size_t, const at::Tensor&) { throw std::out_of_range("mine"); });
  const at::Tensor loss = (a * 2).sum();
  CHECK_THROWS_AS(loss.backward(), std::out_of_range);
}

TEST_CASE("the start and the end of a pass are seen", "[hooks]") {
  const at::Tensor a = leaf();
  std::vector<std::string> events;
  const AccumulateHooks hooks(
      {a}, [&](std::size_t, const at::Tensor&) { events.emplace_back("gradient"); });
  const at::Tensor output = a * 2;
  const auto kept = call_before_backward({output, at::Tensor(), at::ones({1})}, [&] {
    events.emplace_back("start");
    call_after_backward([&] { events.emplace_back(is_nested_backward() ? "nested" : "end"); });
  });
  const at::Tensor loss = output.sum();
  loss.backward({}, /*retain_graph=*/true);
  CHECK(events == std::vector<std::string>{"start", "gradient", "end"});
  // As torch.autograd.grad: nothing is accumulated, so it is no pass of ours.
  torch::autograd::grad({loss}, {output}, {}, /*retain_graph=*/true);
  CHECK(events.size() == 3);
}

TEST_CASE("an output that is a leaf starts passes of the last forward only", "[hooks]") {
  const at::Tensor a = leaf();
  int num_starts = 0;
  std::shared_ptr<void> kept;
  const auto forward = [&] {
    kept = nullptr;
    const at::Tensor output = a * 2;
    kept = call_before_backward({output, a}, [&] { ++num_starts; });
    return output;
  };
  const std::size_t before = accumulator_of(a)->pre_hooks().size();
  for (int round = 1; round <= 3; ++round) {
    const at::Tensor output = forward();
    (output + a).sum().backward({}, /*retain_graph=*/true);
    CHECK(num_starts == 2);  // once per output
    CHECK(accumulator_of(a)->pre_hooks().size() == before + 1);
    // A pass of the leaf alone is none through the forward any more, unlike one of both.
    (a * 3).sum().backward();
    CHECK(num_starts == 2);
    (output + a).sum().backward();
    CHECK(num_starts == 4);
    num_starts = 0;
  }
  forward();
  a.sum().backward();  // the first one
  CHECK(num_starts == 1);
  kept = nullptr;
  a.sum().backward();
  CHECK(num_starts == 1);
}

TEST_CASE("who outlives a pass learns what it has failed of", "[hooks]") {
  const at::Tensor a = leaf();
  PassFailure failure;
  const AccumulateHooks hooks({a}, [&](std::size_t, const at::Tensor&) {
    CHECK(current_graph_task() != nullptr);
    failure = PassFailure::of_current();
    throw std::out_of_range("mine\nand more");
  });
  CHECK(current_graph_task() == nullptr);
  CHECK(PassFailure::of_current().error() == nullptr);
  const at::Tensor loss = (a * 2).sum();
  CHECK_THROWS_AS(loss.backward(), std::out_of_range);
  REQUIRE(failure.error() != nullptr);
  CHECK(first_line_of(failure.error()) == "mine");
  CHECK_THROWS_AS(std::rethrow_exception(failure.error()), std::out_of_range);
}

TEST_CASE("a pass that goes well has no failure", "[hooks]") {
  const at::Tensor a = leaf();
  PassFailure failure;
  const AccumulateHooks hooks(
      {a}, [&](std::size_t, const at::Tensor&) { failure = PassFailure::of_current(); });
  (a * 2).sum().backward();
  CHECK(failure.error() == nullptr);
}

}  // namespace
}  // namespace libddp
