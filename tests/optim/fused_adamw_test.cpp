// Fused AdamW: neighbours as one, and the same numbers either way.

#include "libddp/optim/fused_adamw.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>

#include "tests/support/catch.h"

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

}  // namespace
}  // namespace libddp
