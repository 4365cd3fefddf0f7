#pragma once

// Groups whose ranks, threads of this process, have a fake device each, over the mock NCCL.
//
//   run_device_group(3, [](ProcessGroup& group, c10::Device device) {
//     at::Tensor t = input_of(group.rank(), {5}, at::kFloat).to(device);
//     group.all_reduce(t);
//   });

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "libddp/group/process_group.h"
#include "tests/support/torch_group_fixture.h"

namespace libddp::test {

constexpr int kRanks = 3;
constexpr CallOptions kAsync{.async = true};

/// As run_group; the rank's device is current in its thread. The mock and the race checker begin
/// anew.
void run_device_group(int world_size, const std::function<void(ProcessGroup&, c10::Device)>& f,
                      std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// The same with forked processes; f returns what the parent sees as text. Groups are dropped
/// without shutdown.
std::vector<RankResult> fork_device_group(
    int world_size, const std::function<std::string(ProcessGroup&, c10::Device)>& f,
    std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// fp32, every element the same.
at::Tensor device_tensor(double value, c10::Device device, std::int64_t numel = 16);

/// A stream of the device's pool.
c10::Stream side_stream(c10::Device device);

/// The hooks of both tensors return together, as far as two threads run them.
void let_meet(const at::Tensor& first, const at::Tensor& second);

/// What the race checker has found, one a line; "" = nothing.
std::string races_text();

}  // namespace libddp::test
