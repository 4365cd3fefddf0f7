// AdamW shared over the ranks of a model on devices: the bits of one that is not shared, and the
// streams wait for each other where they must.

#include <torch/serialize.h>

#include "libddp/optim/adamw.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/ddp_fixture.h"
#include "tests/cuda/device_fixture.h"
#include "tests/cuda/trained_replica.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

enum class Passes { OnePerStep, TwoOnce };

/// Some steps, one of them perhaps after two passes; then what an archive holds continues in
/// another optimizer.
std::vector<at::Tensor> train(const Group& group, c10::Device device, Sharing sharing, bool amsgrad,
                              Passes passes) {
  TrainedReplica trained(group, device, sharing, amsgrad);
  for (int step = 0; step < 4; ++step) {
    trained.net.clear(step % 2 == 0);
    trained.loss(batch(group->rank(), step, device)).backward();
    if (step == 2 && passes == Passes::TwoOnce)
      trained.loss(batch(group->rank(), 9, device)).backward();
    trained.optimizer->step();
  }
  std::ostringstream out;
  torch::save(*trained.optimizer, out);
  TrainedReplica resumed(group, device, sharing, amsgrad);
  {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < trained.net.parameters().size(); ++i) {
      resumed.net[i].copy_(trained.net[i]);
    }
  }
  std::istringstream in(out.str());
  torch::load(*resumed.optimizer, in);
  for (int step = 0; step < 2; ++step) resumed.step(batch(group->rank(), step, device));
  std::vector<at::Tensor> values = trained.net.values();
  for (at::Tensor& value : resumed.net.values()) values.push_back(std::move(value));
  return values;
}

void expect_bits_of_one_that_is_not_shared(int world_size, Sharing sharing, bool amsgrad) {
  // A second pass over averages that only their owners have rounds in another place.
  const Passes passes = sharing == Sharing::Gradients ? Passes::OnePerStep : Passes::TwoOnce;
  const auto expected = on_host(world_size, [&](const Group& group, c10::Device device) {
    return train(group, device, Sharing::Nothing, amsgrad, passes);
  });
  run_device_group(world_size, [&](ProcessGroup& group, c10::Device device) {
    const auto found = train(group.shared_from_this(), device, sharing, amsgrad, passes);
    const auto& of_rank = expected[static_cast<std::size_t>(group.rank())];
    expect(found.size() == of_rank.size(), "as many");
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_equal(found[i], of_rank[i], "value " + std::to_string(i));
    }
  });
  REQUIRE(races_text() == "");
}

/// Norms before clipping to 0.5, of some steps.
std::vector<at::Tensor> norms(const Group& group, c10::Device device, Sharing sharing) {
  TrainedReplica trained(group, device, sharing);
  std::vector<at::Tensor> norms;
  for (int step = 0; step < 3; ++step) {
    trained.net.clear();
    trained.loss(batch(group->rank(), step, device)).backward();
    norms.push_back(trained.optimizer->clip_grad_norm(0.5).cpu().to(at::kFloat));
    trained.optimizer->step();
  }
  return norms;
}

/// A step behind a reset of the checker, and a forward behind it. Rank 0's wait `dropped` is not
/// done. Returns the numbers of rank 0's waits in step() that ordered something.
std::set<std::int64_t> step_dropping(std::int64_t dropped, Sharing sharing) {
  std::set<std::int64_t> needed;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    TrainedReplica trained(group.shared_from_this(), device, sharing);
    for (int step = 0; step < 2; ++step) trained.step(batch(group.rank(), step, device));
    trained.net.clear();
    trained.loss(batch(group.rank(), 2, device)).backward();
    group.barrier();
    if (group.rank() == 0) {
      fakegpu::reset();
      if (dropped > 0) fakegpu::ignore_wait(dropped, 0);
    }
    group.barrier();
    const std::int64_t host_waits = fakegpu::num_host_waits(device.index());
    trained.optimizer->step();
    expect(fakegpu::num_host_waits(device.index()) == host_waits, "the host waits for nothing");
    if (group.rank() == 0) {
      for (std::int64_t wait = 1; wait <= fakegpu::num_waits(0); ++wait) needed.insert(wait);
      for (const std::int64_t wait : fakegpu::redundant_waits(0)) needed.erase(wait);
    }
    trained.net.loss(batch(group.rank(), 3, device));
    group.barrier();
  });
  return needed;
}

}  // namespace

TEST_CASE("AdamW shared over devices has the bits of one that is not", "[adamw][shards]") {
  const Sharing sharing = GENERATE(Sharing::State, Sharing::Gradients);
  const int world_size = GENERATE(1, 2);
  const bool amsgrad = GENERATE(false, true);
  CAPTURE(static_cast<int>(sharing), world_size, amsgrad);
  expect_bits_of_one_that_is_not_shared(world_size, sharing, amsgrad);
}

TEST_CASE("three devices share the work of one step as the hosts do", "[adamw][shards]") {
  const Sharing sharing = GENERATE(Sharing::State, Sharing::Gradients);
  expect_as_on_host(3, [&](const Group& group, c10::Device device) {
    return train(group, device, sharing, false, Passes::TwoOnce);
  });
}

TEST_CASE("norms of shared gradients are the host's", "[adamw][shards]") {
  const Sharing sharing = GENERATE(Sharing::State, Sharing::Gradients);
  const auto expected = on_host(
      2, [&](const Group& group, c10::Device device) { return norms(group, device, sharing); });
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    const auto found = norms(group.shared_from_this(), device, sharing);
    const auto& of_rank = expected[static_cast<std::size_t>(group.rank())];
    for (std::size_t i = 0; i < found.size(); ++i) {
      // Squares are added in another order there.
      expect(found[i].allclose(of_rank[i], 1e-5), "norm " + std::to_string(i));
    }
  });
  REQUIRE(races_text() == "");
}

// The gathers run in one stream: the first one's wait for the update is good for all, and the last
// wait for one of them too.
TEST_CASE("the gathers wait for the update, and what follows for them",
          "[adamw][shards][streams]") {
  const Sharing sharing = GENERATE(Sharing::State, Sharing::Gradients);
  const std::set<std::int64_t> needed = step_dropping(0, sharing);
  REQUIRE(races_text() == "");
  REQUIRE(needed.size() > 1);
  for (const std::int64_t dropped : {*needed.begin(), *needed.rbegin()}) {
    CAPTURE(dropped, static_cast<int>(sharing));
    step_dropping(dropped, sharing);
    CHECK(races_text() != "");
  }
}
