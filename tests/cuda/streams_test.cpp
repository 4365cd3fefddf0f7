// In which order the streams of a group do what, and how long memory is kept. The race checker
// finds what nothing orders, whether or not it met in time; dropping a wait must make it find
// something.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// What scripts do with streams: results used on the stream of the call and on others, synchronous
/// calls between asynchronous ones, inputs that nobody holds any more.
void use_streams(ProcessGroup& group, c10::Device device) {
  const double rank = group.rank();
  const c10::Stream side = side_stream(device);
  at::Tensor first = device_tensor(rank, device);
  const WorkPtr on_group = group.all_reduce(first, {}, kAsync);
  at::Tensor second = device_tensor(1, device);
  group.all_reduce(second);  // behind the first, on this stream
  at::Tensor third;
  WorkPtr on_side;
  {
    const c10::StreamGuard guard(side);
    third = device_tensor(rank, device);
    on_side = group.all_reduce(third, {}, kAsync);
    group.broadcast(device_tensor(3, device), 0, kAsync);  // nobody waits for it, or holds it
    on_side->wait();
    third.add_(1);
  }
  on_group->wait();
  first.add_(second);
  at::Tensor gathered = at::empty({group.size() * 16}, first.options());
  group.all_gather_into(gathered, first, kAsync)->wait();
  gathered.add_(1);
}

}  // namespace

TEST_CASE("streams wait for what they use and for nothing else", "[nccl][streams]") {
  run_device_group(2, use_streams);
  REQUIRE(races_text() == "");
}

TEST_CASE("no wait of a stream can be left out", "[nccl][streams][drops_waits]") {
  run_device_group(2, use_streams);
  const std::int64_t num_waits = fakegpu::num_waits(0);
  const std::vector<std::int64_t> redundant = fakegpu::redundant_waits(0);
  REQUIRE(num_waits >= 5);
  REQUIRE(num_waits > static_cast<std::int64_t>(redundant.size()));
  for (std::int64_t k = 1; k <= num_waits; ++k) {
    if (std::find(redundant.begin(), redundant.end(), k) != redundant.end()) continue;
    INFO("without wait " << k << " of " << num_waits);
    run_device_group(2, [k](ProcessGroup& group, c10::Device device) {
      if (group.rank() == 0) fakegpu::ignore_wait(k, 0);
      use_streams(group, device);
    });
    REQUIRE(races_text() != "");
  }
}

TEST_CASE("neither a call nor a wait blocks the host", "[nccl][streams]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    at::Tensor first = device_tensor(1, device);
    at::Tensor second = device_tensor(2, device);
    group.connect(device);
    fakegpu::Hold hold(fakegpu::current_stream(device.index()));
    const WorkPtr async = group.all_reduce(first, {}, kAsync);
    const WorkPtr sync = group.all_reduce(second);
    async->wait();
    sync->wait();
    expect(!async->is_completed() && !sync->is_completed(), "nothing has run yet");
    expect(async->is_stream_ordered(), "stream-ordered");
    hold.release();
    sync->synchronize();
    expect(async->is_completed(), "it was issued before");
    expect(first[0].item<float>() == 2 && second[0].item<float>() == 4, "sums");
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("a barrier blocks the host until all ranks' streams have come to it", "[nccl][streams]") {
  std::atomic<bool> is_released{false};
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    group.connect(device);
    std::optional<fakegpu::Hold> hold;
    std::thread later;
    if (group.rank() == 1) {
      hold.emplace(fakegpu::current_stream(device.index()));
      later = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        is_released = true;
        hold->release();
      });
    }
    group.barrier();
    expect(is_released, "the other rank's stream has gone on");
    if (later.joinable()) later.join();
  });
}

TEST_CASE("callbacks run once the device has done it", "[nccl][streams]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    at::Tensor tensor = device_tensor(1, device);
    group.connect(device);
    std::atomic<int> num_called{0};
    fakegpu::Hold hold(fakegpu::current_stream(device.index()));
    group.all_reduce(tensor, {}, kAsync)->on_complete([&](Work& work) {
      if (work.is_completed() && !work.exception()) ++num_called;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    expect(num_called == 0, "not before");
    hold.release();
    wait_until([&] { return num_called == 1; });
  });
}

TEST_CASE("memory of an operation is kept until its stream may have it again", "[nccl][streams]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const c10::Stream side = side_stream(device);
    for (int i = 0; i < 20; ++i) {
      WorkPtr work;
      {
        const at::Tensor input = device_tensor(i, device, 1 << 12);
        at::Tensor output = at::empty({2 << 12}, input.options());
        work = group.all_gather_into(output, input, kAsync);
      }
      // Waited for on another stream, or not at all: the memory may not come back through that.
      const c10::StreamGuard guard(side);
      if (i % 3 != 0) work->wait();
      work = nullptr;
      const c10::StreamGuard back(fakegpu::current_stream(device.index()));
      device_tensor(-1, device, 1 << 12).add_(1);
    }
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("what is captured into a graph is asked for by nobody", "[nccl][streams]") {
  run_device_group(1, [](ProcessGroup& group, c10::Device device) {
    at::Tensor tensor = device_tensor(1, device);
    group.all_reduce(tensor);
    fakegpu::set_capturing(true);
    const WorkPtr captured = group.all_reduce(tensor, {}, kAsync);
    captured->wait();
    group.all_reduce(tensor);
    fakegpu::set_capturing(false);
    group.all_reduce(tensor);
    expect(first(tensor.cpu()) == 1, "world of one");
    // A shutdown waits for what is in flight; what was captured is not.
  });
}
