// Gradients that several streams accumulate: the order of streams around the buckets. Each wait for
// an event that the copies into buckets bring is needed: without it there is a race.

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "libddp/autograd/accumulator.h"
#include "tests/cuda/ddp_fixture.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Runs `f` on another stream, behind the current one; the current one goes on behind it.
template <typename Function>
auto beside(const c10::Stream& stream, c10::Device device, Function&& f) {
  c10::Event event(device.type());
  event.record(fakegpu::current_stream(device.index()));
  event.block(stream);
  auto result = [&] {
    const c10::StreamGuard guard(stream);
    return f();
  }();
  event.record(stream);
  event.block(fakegpu::current_stream(device.index()));
  return result;
}

/// A network whose layers each have a stream, that of their gradients too.
struct StreamedNet {
  explicit StreamedNet(c10::Device on) : net(on), device(on) {
    for (int number = 0; number < 3; ++number) {
      streams.push_back(number == 0 ? fakegpu::current_stream(on.index()) : side_stream(on));
      const c10::StreamGuard guard(streams.back());
      // Autograd accumulates on the stream that is current now.
      for (const int index : {2 * number, 2 * number + 1}) {
        nodes.push_back(accumulator_of(net[static_cast<std::size_t>(index)]));
      }
    }
  }

  at::Tensor loss(const at::Tensor& input, int num_layers = 3) const {
    at::Tensor hidden = input;
    for (int number = 0; number < num_layers; ++number) {
      hidden = beside(streams[static_cast<std::size_t>(number)], device,
                      [&] { return net.layer(number, hidden); });
    }
    return hidden.pow(2).sum();
  }

  TrainedNet net;
  c10::Device device;
  std::vector<c10::Stream> streams;
  std::vector<AccumulatorPtr> nodes;
};

ReducerOptions one_bucket() {
  ReducerOptions options;
  options.limits = {.first_bytes = 1 << 20, .cap_bytes = 1 << 20, .last_bytes = 1 << 20};
  return options;
}

/// What comes before the pass that averages: nothing, a local pass, or one that leaves a gradient
/// of the last layer to the pass that averages the others.
enum class Before { Nothing, Local, Left };

/// Three steps, the last one behind a reset of the checker. Rank 0's wait `dropped` is not done.
/// Returns the numbers of rank 0's waits that come directly after a copy beside its main stream:
/// the stream that sends waits for the copy's, or the group's stream for it.
std::set<std::int64_t> train_dropping(std::int64_t dropped, ReducerOptions options, Before before) {
  std::set<std::int64_t> after_copies;
  options.find_unused_parameters = before == Before::Left;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    StreamedNet streamed(device);
    TrainedNet& net = streamed.net;
    const auto reducer = Reducer::create(net.parameters(), group.shared_from_this(), options);
    const auto train = [&](int number) {
      net.clear();
      const at::Tensor input = batch(group.rank(), number, device);
      if (before != Before::Nothing) streamed.loss(input).backward();
      const at::Tensor loss = streamed.loss(input, before == Before::Left ? 2 : 3);
      reducer->prepare_for_backward({loss});
      loss.backward();
      net.update();
    };
    train(0);
    train(1);  // gradients have moved to the final buckets
    group.barrier();
    if (group.rank() == 0) {
      fakegpu::reset();
      if (dropped > 0) fakegpu::ignore_wait(dropped, 0);
    }
    group.barrier();
    {
      std::optional<CountedCalls> calls;
      if (group.rank() == 0) {
        const auto is_main = [main = streamed.streams[0]](const c10::Stream& stream) {
          return stream == main;
        };
        calls.emplace("aten::_foreach_copy_", [&after_copies, before, is_main] {
          const c10::impl::VirtualGuardImpl guard(fakegpu::device_at(0).type());
          if (guard.getDevice().index() != 0 || is_main(fakegpu::current_stream(0))) return;
          after_copies.insert(fakegpu::num_waits(0) + 1);
          // The one behind it is for the gradient that was left.
          if (before == Before::Left) after_copies.insert(fakegpu::num_waits(0) + 2);
        });
      }
      train(2);
    }
    {
      // Memory that has been given back too early is used again here.
      const c10::StreamGuard guard(streamed.streams[2]);
      at::ones({24}, at::TensorOptions().device(device));
    }
    group.barrier();
  });
  return after_copies;
}

}  // namespace

TEST_CASE("layers on streams of their own give the host's bits", "[ddp][streams]") {
  const bool is_one_bucket = GENERATE(true, false);
  const bool as_view = GENERATE(true, false);
  ReducerOptions options = is_one_bucket ? one_bucket() : small_buckets();
  options.gradient_as_bucket_view = as_view;
  const auto expected = on_host(2, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer = Reducer::create(net.parameters(), group, options);
    for (int i = 0; i < 3; ++i) {
      net.clear();
      step(*reducer, net, batch(group->rank(), i, device));
    }
    return net.values();
  });
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    StreamedNet streamed(device);
    const auto reducer =
        Reducer::create(streamed.net.parameters(), group.shared_from_this(), options);
    for (int i = 0; i < 3; ++i) {
      streamed.net.clear();
      const at::Tensor loss = streamed.loss(batch(group.rank(), i, device));
      reducer->prepare_for_backward({loss});
      loss.backward();
      streamed.net.update();
    }
    const std::vector<at::Tensor> found = streamed.net.values();
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_equal(found[i], expected[static_cast<std::size_t>(group.rank())][i],
                   fmt::format("parameter {}", i));
    }
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("every wait around a copy is needed", "[ddp][streams][drops_waits]") {
  const Before before = GENERATE(Before::Nothing, Before::Local, Before::Left);
  const bool is_one_bucket = before == Before::Left || GENERATE(true, false);
  const ReducerOptions options = is_one_bucket ? one_bucket() : small_buckets();
  const std::set<std::int64_t> after_copies = train_dropping(0, options, before);
  REQUIRE(races_text() == "");
  REQUIRE(after_copies.size() > 1);
  for (const std::int64_t dropped : after_copies) {
    CAPTURE(dropped, static_cast<int>(before), is_one_bucket);
    train_dropping(dropped, options, before);
    CHECK(races_text() != "");
  }
}
