// The device's own times in the flight log, where somebody asks for them.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr int kDelayMs = 20;

/// "device_ns" of the operations on devices that are done, in their order.
std::vector<std::int64_t> device_times(const std::string& log) {
  std::vector<std::int64_t> times;
  const std::string key = "\"device_ns\": ";
  for (std::size_t at = log.find(R"("device": "accelerator", "state": "done")");
       at != std::string::npos;
       at = log.find(R"("device": "accelerator", "state": "done")", at + 1)) {
    times.push_back(std::stoll(log.substr(log.find(key, at) + key.size())));
  }
  return times;
}

/// Of a synchronous operation and one on the group's stream, each of which takes kDelayMs.
std::vector<std::int64_t> times_of_two(ProcessGroup& group, c10::Device device) {
  mock_nccl::delay(kDelayMs);
  group.all_reduce(device_tensor(1, device));
  group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
  std::vector<std::int64_t> times = device_times(group.flight_log());
  // The watchdog reads them a moment later.
  for (int tries = 0; times.size() < 2 && tries < 1000; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    times = device_times(group.flight_log());
  }
  return times;
}

}  // namespace

TEST_CASE("the flight log has the device's times where they are asked for", "[nccl][timing]") {
  ::setenv("LIBDDP_NCCL_TIMING", "1", 1);
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const std::vector<std::int64_t> times = times_of_two(group, device);
    expect(times.size() == 2, "both are done");
    for (const std::int64_t time : times) {
      expect(time >= kDelayMs * 1'000'000, "the delay is in it: " + std::to_string(time));
    }
  });
  ::unsetenv("LIBDDP_NCCL_TIMING");
}

TEST_CASE("no device's times are taken unless they are asked for", "[nccl][timing]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    expect(times_of_two(group, device) == std::vector<std::int64_t>{0, 0}, "zero");
  });
}
