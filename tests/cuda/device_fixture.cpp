#include "tests/cuda/device_fixture.h"

#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <memory>
#include <thread>

#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/race_checker.h"

namespace libddp::test {

void run_device_group(int world_size, const std::function<void(ProcessGroup&, c10::Device)>& f,
                      std::chrono::milliseconds timeout) {
  mock_nccl::reset();
  mock_nccl::install();
  fakegpu::reset();
  run_group(
      world_size,
      [&](ProcessGroup& group) {
        const c10::Device device = fakegpu::device_at(group.rank());
        const c10::DeviceGuard guard(device);
        f(group, device);
      },
      timeout);
}

std::vector<RankResult> fork_device_group(
    int world_size, const std::function<std::string(ProcessGroup&, c10::Device)>& f,
    std::chrono::milliseconds timeout) {
  mock_nccl::reset();
  mock_nccl::install();
  return fork_group(
      world_size,
      [&](const Group& group) {
        const c10::Device device = fakegpu::device_at(group->rank());
        const c10::DeviceGuard guard(device);
        return f(*group, device);
      },
      timeout);
}

at::Tensor device_tensor(double value, c10::Device device, std::int64_t numel) {
  return at::full({numel}, value, at::TensorOptions().dtype(at::kFloat).device(device));
}

c10::Stream side_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void let_meet(const at::Tensor& first, const at::Tensor& second) {
  const auto num_there = std::make_shared<std::atomic<int>>(0);
  for (const at::Tensor& tensor : {first, second}) {
    tensor.register_hook([num_there](const at::Tensor& gradient) {
      num_there->fetch_add(1);
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (num_there->load() < 2 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      return gradient;
    });
  }
}

std::string races_text() {
  std::string text;
  for (const fakegpu::Race& race : fakegpu::races()) text += race.text() + "\n";
  return text;
}

}  // namespace libddp::test
