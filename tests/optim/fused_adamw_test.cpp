// Fused AdamW: neighbours as one, and the same numbers either way.

#include "libddp/optim/fused_adamw.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

std::vector<at::Tensor> in_one_block(double seed) {
  const at::Tensor flat = at::sin(at::arange(60, at::kFloat) + seed);
  return {flat.narrow(0, 0, 20).view({4, 5}), flat.narrow(0, 20, 0).view({0, 5}),
          flat.narrow(0, 20, 8), flat.narrow(0, 28, 32).view({2, 16})};
}

std::vector<at::Tensor> apart(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  // Twice as large, so that the allocator cannot put them one behind the other.
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor room = at::full({2 * tensor.numel() + 1}, 7, at::kFloat);
    copies.push_back(room.narrow(0, 0, tensor.numel()).view(tensor.sizes()).copy_(tensor));
  }
  return copies;
}

TEST_CASE("neighbours are updated as one tensor, with the same bits", "[adamw]") {
  const auto together = in_one_block(0);
  const auto gradients = in_one_block(9);
  const auto single = apart(together);
  const auto single_gradients = apart(gradients);
  const AdamwState state = make_adamw_state(together);
  const AdamwState single_state = make_adamw_state(single);
  for (int step = 0; step < 3; ++step) {
    CHECK(fused_adamw(together, gradients, state, {.lr = 0.1}) == 1);
    CHECK(fused_adamw(single, single_gradients, single_state, {.lr = 0.1}) == 3);
  }
  for (std::size_t i = 0; i < together.size(); ++i) {
    CHECK(at::equal(together[i], single[i]));
    CHECK(state.steps[i].item<float>() == 3);
    CHECK(state.exp_avgs[i].sizes() == together[i].sizes());
  }
}

TEST_CASE("entries with other steps are not taken together", "[adamw]") {
  const auto parameters = in_one_block(0);
  const AdamwState state = make_adamw_state(parameters, true);
  state.steps[2].fill_(5);
  CHECK(fused_adamw(parameters, in_one_block(1), state, {.amsgrad = true}) == 3);
  CHECK(state.steps[2].item<float>() == 6);
}

TEST_CASE("a step with infinities does nothing", "[adamw]") {
  const auto parameters = in_one_block(0);
  const AdamwState state = make_adamw_state(parameters);
  fused_adamw(parameters, in_one_block(1), state, {}, at::full({}, 2.0f), at::full({}, 1.0f));
  CHECK(at::equal(parameters[0], in_one_block(0)[0]));
  CHECK(state.steps[0].item<float>() == 0);
}

TEST_CASE("a state of other parameters is refused before anything is written", "[adamw]") {
  const std::vector<at::Tensor> large{at::full({4, 5}, 1.0f), at::full({9}, 1.0f)};
  const std::vector<at::Tensor> gradients{at::full({4, 5}, 1.0f), at::full({9}, 1.0f)};
  AdamwState state = make_adamw_state(large);
  const auto text = [&](const AdamwOptions& options) {
    return test::message_of<StateError>([&] { fused_adamw(large, gradients, state, options); });
  };
  state.exp_avg_sqs[1] = at::zeros({2});
  CHECK(test::contains(text({}), "exp_avg_sq of parameter 1 has 2 elements, the parameter 9"));
  state = make_adamw_state(large);
  state.exp_avgs[0] = at::zeros({400});
  CHECK(test::contains(text({}), "exp_avg of parameter 0 has 400 elements, the parameter 20"));
  CHECK(state.steps[0].item<float>() == 0);
}

}  // namespace
}  // namespace libddp
