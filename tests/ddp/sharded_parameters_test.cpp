// Sharded averages and parameters, on one host and on two simulated ones.

#include "libddp/ddp/sharded_parameters.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/base/error.h"
#include "libddp/ddp/reducer.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;

/// Rank r lives on host r % num_hosts.
void with_hosts(int world_size, int num_hosts, const std::function<void(Group)>& f) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  test::run_ranks(world_size, [&](int rank) {
    ProcessGroup::Options options;
    options.rank = rank;
    options.world_size = world_size;
    options.timeout = std::chrono::seconds(60);
    options.host_identity = fmt::format("host {}", rank % num_hosts);
    const Group group = ProcessGroup::create(store, options);
    f(group);
    group->shutdown();
  });
}

NamedTensors odd_parameters() {
  NamedTensors parameters;
  for (const int n : {1, 7, 40, 3, 129}) {
    at::Tensor tensor = at::arange(n, at::kFloat);
    parameters.push_back({fmt::format("p{}", n), tensor.set_requires_grad(true)});
  }
  return parameters;
}

/// Gradients are (index + 1) * scale everywhere.
void run_sharded_pass(Reducer& reducer, const NamedTensors& parameters, double scale) {
  at::Tensor loss = at::zeros({});
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    loss = loss + parameters[i].tensor.sum() * ((static_cast<double>(i) + 1) * scale);
  }
  reducer.prepare_for_backward({loss});
  loss.backward();
}

void forget_gradients(const NamedTensors& parameters) {
  for (const NamedTensor& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
}

bool holds_only(const at::Tensor& tensor, double value) {
  return tensor.equal(at::full_like(tensor, value));
}

TEST_CASE("each rank updates what it owns, and all see everything", "[sharded_parameters]") {
  const auto [world_size, num_hosts] =
      GENERATE(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(3, 3), std::pair(4, 2));
  const bool averages = GENERATE(false, true);
  with_hosts(world_size, num_hosts, [&](const Group& group) {
    const NamedTensors parameters = odd_parameters();
    ReducerOptions options;
    options.limits = {.first_bytes = 200, .cap_bytes = 200, .last_bytes = 200};
    const auto reducer = Reducer::create(parameters, group, options);
    reducer->shard(averages);
    expect(!reducer->has_blocks(), "blocks come with the first pass");
    const double mean = (world_size + 1) / 2.0;
    run_sharded_pass(*reducer, parameters, group->rank() + 1);
    expect(reducer->has_blocks(), "they are there");
    ShardedParameters sharded(parameters, group, reducer->shared_buckets());
    const auto numbers = sharded.make_numbers();
    for (int step = 0; step < 3; ++step) {
      if (step > 0) {
        forget_gradients(parameters);
        run_sharded_pass(*reducer, parameters, group->rank() + 1);
      }
      sharded.begin_update();
      const c10::NoGradGuard no_grad;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor gradient = sharded.own_gradient(i);
        const at::Tensor& whole = parameters[i].tensor.grad();
        const bool is_average = holds_only(whole, (static_cast<double>(i) + 1) * mean);
        expect(is_average || (averages && step > 0), "everyone's average");
        expect(holds_only(gradient, (static_cast<double>(i) + 1) * mean), "own average");
        sharded.own(i).sub_(gradient);
        numbers->own(i).add_(gradient);
      }
      sharded.publish();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor& now = parameters[i].tensor;
        const double sum = (static_cast<double>(i) + 1) * mean * (step + 1);
        expect(now.equal(at::arange(now.numel(), at::kFloat) - sum), "everyone's update");
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const double sum = (static_cast<double>(i) + 1) * mean * 3;
      expect(holds_only(numbers->whole(i), sum), "state of all");
    }
    group->barrier();  // what is loaded is there for the others at once
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      numbers->load(i, at::arange(parameters[i].tensor.numel(), at::kFloat));
    }
    group->barrier();
    expect(numbers->whole(4).equal(at::arange(129, at::kFloat)), "loaded");
    group->barrier();
  });
}

TEST_CASE("what every rank changes in place is changed once", "[sharded_parameters]") {
  const auto [world_size, num_hosts] = GENERATE(std::pair(1, 1), std::pair(3, 1), std::pair(4, 2));
  with_hosts(world_size, num_hosts, [&](const Group& group) {
    NamedTensors parameters = odd_parameters();
    const at::Tensor large = at::ones({40000}).set_requires_grad(true);
    parameters.push_back({"large", large});
    const auto reducer = Reducer::create(parameters, group, {});
    reducer->shard(false);
    run_sharded_pass(*reducer, parameters, 1);
    ShardedParameters sharded(parameters, group, reducer->shared_buckets());
    const c10::NoGradGuard no_grad;
    at::Tensor expected = at::ones({40000});
    for (int step = 0; step < 3; ++step) {
      large.detach().mul_(2);
      expected.mul_(2);
      expect(large.equal(expected), "each rank sees its own change");
      large.detach().narrow(0, 100, 2).fill_(group->rank());
      group->barrier();
      expect(large[100].item<int>() == group->rank(), "and none of another one's");
      large.detach().narrow(0, 100, 2).copy_(expected.narrow(0, 100, 2));
      sharded.begin_update();
      expect(holds_only(sharded.own(5), expected[0].item<double>()), "taken in");
      sharded.own(5).add_(1);
      sharded.publish();
      expected.add_(1);
      expect(large.equal(expected), "updated by its owners");
      expect(parameters[4].tensor.equal(at::arange(129, at::kFloat)), "untouched");
    }
    large.detach().fill_(group->rank());
    sharded.begin_update();
    sharded.publish();
    const ElementRange own = reducer->buckets().owned(5, group->rank());
    expect(holds_only(large.narrow(0, own.begin, own.numel()), group->rank()), "the owner's");
    const at::Tensor first = large.clone();
    group->broadcast(first, 0);
    expect(large.equal(first), "alike on all ranks");
  });
}

TEST_CASE("a gradient on top of an average is averaged with it", "[sharded_parameters]") {
  with_hosts(2, 1, [](const Group& group) {
    const NamedTensors parameters = odd_parameters();
    const auto reducer = Reducer::create(parameters, group, {});
    reducer->shard(true);
    for (int pass = 0; pass < 3; ++pass) run_sharded_pass(*reducer, parameters, group->rank() + 1);
    const GradientBuckets& buckets = reducer->buckets();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const ElementRange own = buckets.owned(i, group->rank());
      const at::Tensor mine = buckets.flat_view(i).narrow(0, own.begin, own.numel());
      expect(holds_only(mine, (static_cast<double>(i) + 1) * 1.5 * 3), "sum of three averages");
    }
    // A pass whose beginning nobody sees.
    at::Tensor loss = parameters[1].tensor.sum();
    reducer->prepare_for_backward({});
    expect(contains(message_of<StateError>([&] { loss.backward(); }),
                    "parameter 'p7': its gradient was added to the average"),
           "refused");
  });
}

TEST_CASE("an optimizer's work is shared once, and without a hook", "[sharded_parameters]") {
  with_hosts(1, 1, [](const Group& group) {
    const NamedTensors parameters = odd_parameters();
    const auto reducer = Reducer::create(parameters, group, {});
    reducer->shard(false);
    expect(contains(message_of<StateError>([&] { reducer->shard(true); }), "shares it already"),
           "twice");
    expect(contains(message_of<StateError>([&] { reducer->register_comm_hook(nullptr); }),
                    "cannot exchange the gradients of an optimizer whose work is shared"),
           "hook");
  });
}

}  // namespace
}  // namespace libddp
