// Memory of sharded models on devices, and that every wait of a step is needed.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "libddp/fsdp/device_buffers.h"
#include "tests/cuda/device_fixture.h"
#include "tests/cuda/sharded_net.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Allocated beyond this rank's shards once the model has run.
std::int64_t buffer_bytes(ProcessGroup& group, c10::Device device, int layers) {
  const std::int64_t before = fakegpu::memory_use(device.index()).allocated_bytes;
  ShardedNet net({.shard = group.shared_from_this()}, device, {64, layers});
  const std::int64_t shards = fakegpu::memory_use(device.index()).allocated_bytes;
  {
    const c10::NoGradGuard no_grad;
    net.forward(batch_at(group.rank(), 0).to(device));
    net.forward(batch_at(group.rank(), 0).to(device));
  }
  const std::int64_t now = fakegpu::memory_use(device.index()).allocated_bytes;
  expect(shards > before, "a rank owns something");
  return now - shards;
}

void train_twice(ProcessGroup& group, c10::Device device, bool offloads) {
  Training training;
  training.num_steps = 2;
  if (offloads) {
    training.options = [=](ProcessGroup& ranks) {
      return ShardOptions{.shard = ranks.shared_from_this(), .compute_device = device};
    };
  }
  train(group, device, training);
}

}  // namespace

TEST_CASE("buffers of whole parameters are as many for any number of units", "[fsdp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const std::int64_t few = buffer_bytes(group, device, 4);
    const std::int64_t many = buffer_bytes(group, device, 12);
    expect(few > 0, "there are some");
    expect(many == few, "as many");
    // A unit that computes, one that is gathered, and the root.
    expect(many <= 3 * (64 * 64 + 64 + 64) * 4, "two and the root's");
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("a buffer goes to who takes it next behind all that have used it", "[fsdp]") {
  run_device_group(1, [](ProcessGroup&, c10::Device device) {
    DeviceBuffers pool(nullptr, device);
    const at::Tensor mine = at::empty({100}, at::TensorOptions().device(device));
    DeviceBuffer first = pool.take(100, at::kFloat);
    const void* const memory = first.bytes.data_ptr();
    const c10::Stream side = side_stream(device);
    {
      const c10::StreamGuard guard(side);
      first.as(100, at::kFloat).fill_(1);
      first.users.add_current();
    }
    pool.give(std::move(first));
    DeviceBuffer second = pool.take(20, at::kFloat);
    expect(second.bytes.data_ptr() == memory, "a smaller one lies there too");
    second.as(20, at::kFloat).fill_(2);
    second.users.add_current();
    const DeviceBuffer third = pool.take(20, at::kFloat);
    expect(third.bytes.data_ptr() != memory, "what is in use is nobody else's");
    pool.give(std::move(second));
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("each wait of a sharded step is needed", "[fsdp][drops_waits]") {
  const auto offloads = GENERATE(false, true);
  std::int64_t num_waits = 0;
  std::vector<std::int64_t> redundant;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    train_twice(group, device, offloads);
    if (group.rank() > 0) return;
    num_waits = fakegpu::num_waits(0);
    redundant = fakegpu::redundant_waits(0);
  });
  REQUIRE(races_text() == "");
  REQUIRE(num_waits > 10);
  REQUIRE(static_cast<std::int64_t>(redundant.size()) < num_waits / 2);
  std::int64_t num_needed = 0;
  for (std::int64_t k = 1; k <= num_waits; ++k) {
    if (std::count(redundant.begin(), redundant.end(), k) > 0) continue;
    run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
      if (group.rank() == 0) fakegpu::ignore_wait(k, 0);
      train_twice(group, device, offloads);
    });
    num_needed += races_text() != "";
  }
  // What a wait orders, a later one of the same streams may order too, before anybody looks; which
  // comes first differs with the ranks' timing (79 to 100 of 100 are needed).
  REQUIRE(10 * num_needed >= 7 * (num_waits - static_cast<std::int64_t>(redundant.size())));
}

// What a pass has copied to the host's memory is read there, and what it has copied from there is
// written.
TEST_CASE("the host waits for the copies of what is offloaded once per pass", "[fsdp]") {
  std::int64_t num_waits = 0;
  const auto run = [&](std::int64_t ignored) {
    run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
      const ShardOptions options{.shard = group.shared_from_this(), .compute_device = device};
      ShardedNet net(options, device);
      const at::Tensor x = batch_at(group.rank(), 0).to(device);
      const int index = device.index();
      const std::int64_t before = fakegpu::num_host_waits(index);
      if (ignored > 0 && index == 0) fakegpu::ignore_host_wait(before + ignored, index);
      mean_square(net.forward(x)).backward();
      if (index == 0) num_waits = fakegpu::num_host_waits(index) - before;
      net.step();
    });
    return races_text();
  };
  REQUIRE(run(0) == "");
  REQUIRE(num_waits == 1);
  const std::string races = run(1);
  // Averages that the optimizer reads, and shards that it writes.
  REQUIRE(contains(races, "aten::copy_ #"));
  REQUIRE(contains(races, "aten::mul of the host"));
  REQUIRE(contains(races, "aten::sub_ of the host"));
}

TEST_CASE("a sharded step adds collectives to a plain one, and nothing else", "[fsdp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const auto operations_of_a_pass = [&](const ShardOptions& options) {
      // Rows that divide evenly.
      ShardedNet net(options, device, {8, 4});
      const at::Tensor x = batch_at(group.rank(), 0).to(device);
      std::int64_t added = 0;
      for (int pass = 0; pass < 2; ++pass) {
        const std::int64_t operations = fakegpu::num_operations(device.index());
        const std::int64_t waits = fakegpu::num_host_waits(device.index());
        mean_square(net.forward(x)).backward();
        added = fakegpu::num_operations(device.index()) - operations;
        expect(fakegpu::num_host_waits(device.index()) == waits, "the host waits for nothing");
        for (const at::Tensor& p : net.parameters()) p.mutable_grad() = at::Tensor();
      }
      return added;
    };
    const std::int64_t plain = operations_of_a_pass({});
    const std::int64_t sharded = operations_of_a_pass({.shard = group.shared_from_this()});
    const std::int64_t replicated = operations_of_a_pass({.replicate = group.shared_from_this()});
    // Five units: each gathered in the forward, all but the root in the backward, each averaged.
    expect(sharded - plain == 5 + 4 + 5,
           "gathers and averages, not " + std::to_string(sharded - plain));
    // And each the ones that tell who has used what, which an all-reduce overwrites.
    expect(replicated - plain == 5 + 5, "averages, not " + std::to_string(replicated - plain));
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("no memory for a unit names it, and nothing else is lost", "[fsdp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    ShardedNet net({.shard = group.shared_from_this()}, device, {64, 3});
    const at::Tensor x = batch_at(group.rank(), 0).to(device);
    fakegpu::set_memory_limit(device.index(),
                              fakegpu::memory_use(device.index()).allocated_bytes + 12000);
    const std::string text = message_of<c10::OutOfMemoryError>([&] { net.forward(x); });
    fakegpu::set_memory_limit(device.index(), -1);
    expect(contains(text, "16640 bytes for its parameters"), text);
    expect(contains(text, "layer.1"), text);
    mean_square(net.forward(x)).backward();
    net.step();
  });
  REQUIRE(races_text() == "");
}
