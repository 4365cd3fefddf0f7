#include "libddp/activation/slot_scope.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <string>
#include <vector>

#include "libddp/activation/checkpoint_error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::message_of;

/// exp(sin(x)) with a graph of its own; what `runs` counts.
struct Slotted {
  struct Stop {};

  explicit Slotted(std::optional<bool> stop_early = std::nullopt) {
    CheckpointFrame::Caller caller;
    caller.name = [] { return std::string("exp of sin"); };
    caller.stop = [] { throw Stop(); };
    caller.replay = [this](const std::shared_ptr<ReplayPass>& pass) {
      const SlotScope scope(frame, pass);
      try {
        run();
      } catch (const Stop&) {
        ++stops;
      }
    };
    CheckpointFrame::Settings settings;
    settings.stop_early = stop_early;
    frame = std::make_shared<CheckpointFrame>(settings, std::move(caller));
  }

  at::Tensor run() {
    ++runs;
    const at::Tensor y = x.sin().exp();
    ++ends;
    return is_steady || runs == 1 ? y : y.exp();
  }

  at::Tensor forward() {
    frame->begin_forward({});
    const SlotScope scope(frame);
    const at::Tensor y = run();
    frame->end_forward();
    return y;
  }

  std::shared_ptr<CheckpointFrame> frame;
  at::Tensor x = at::randn({5}).set_requires_grad(true);
  bool is_steady = true;
  int runs = 0;
  int ends = 0;
  int stops = 0;
};

at::Tensor expected_gradient(const at::Tensor& x) {
  const at::Tensor leaf = x.detach().clone().set_requires_grad(true);
  leaf.sin().exp().sum().backward();
  return leaf.grad();
}

}  // namespace

TEST_CASE("a block's saved tensors go to slots and come back from one replay") {
  Slotted block;
  block.forward().sum().backward();
  CHECK(at::equal(block.x.grad(), expected_gradient(block.x)));
  CHECK(block.runs == 2);
  CHECK(block.stops == 0);
  CHECK(SlotScope::innermost() == nullptr);
}

TEST_CASE("a replay may end with the last slot") {
  Slotted block(/*stop_early=*/true);
  block.forward().sum().backward();
  CHECK(at::equal(block.x.grad(), expected_gradient(block.x)));
  CHECK(block.runs == 2);
  CHECK(block.ends == 1);
  CHECK(block.stops == 1);
}

TEST_CASE("another number of slots in the replay is told") {
  Slotted block;
  block.is_steady = false;
  const at::Tensor y = block.forward();
  const std::string message = message_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(contains(message, "exp of sin: torch.utils.checkpoint: trying to save more tensors"));
}

TEST_CASE("outside of scopes the engine is torch's") {
  using torch::autograd::Engine;
  Slotted block;
  block.forward();
  Engine* const torchs = &Engine::get_default_engine();
  {
    const SlotScope scope(block.frame);
    CHECK(&Engine::get_default_engine() != torchs);
  }
  CHECK(&Engine::get_default_engine() == torchs);
}

}  // namespace libddp
