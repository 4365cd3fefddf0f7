// What becomes of a group of device tensors when something goes wrong: who is told what, how soon,
// and what is left behind.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "libddp/base/error.h"
#include "libddp/cuda/nccl_api.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/support/catch.h"
#include "tests/support/require_parts.h"

using namespace libddp;
using namespace libddp::test;

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Calls collectives until the group fails, and says of what.
std::string fail_of(ProcessGroup& group, c10::Device device) {
  const auto end = std::chrono::steady_clock::now() + seconds(30);
  try {
    while (std::chrono::steady_clock::now() < end) {
      group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "it did not fail";
}

/// The messages of all ranks; each rank shuts down in spite of its failure.
class Messages {
 public:
  void put(int rank, std::string text) {
    const std::lock_guard lock(mutex_);
    if (texts_.size() <= static_cast<std::size_t>(rank)) texts_.resize(rank + 1);
    texts_[rank] = std::move(text);
  }
  const std::string& of(int rank) const { return texts_.at(rank); }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

}  // namespace

TEST_CASE("an error of NCCL is the rank's own, and the others name that rank", "[nccl][failures]") {
  Messages messages;
  run_device_group(3, [&](ProcessGroup& group, c10::Device device) {
    if (group.rank() == 1) mock_nccl::fail("all_reduce", 3, ncclSystemError, 1);
    messages.put(group.rank(), fail_of(group, device));
  });
  require_parts(messages.of(1), {"libddp[group test, rank 1/3]", "all_reduce #3 float32 [16]",
                                 "NCCL", "unhandled system error", "NCCL_DEBUG=INFO"});
  for (const int rank : {0, 2}) {
    require_parts(messages.of(rank), {"rank 1 (pid ", "failed: all_reduce #3"});
  }
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE("an error that NCCL reports later ends the group", "[nccl][failures]") {
  Messages messages;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    if (group.rank() == 0) {
      mock_nccl::hang(2, 0);
      mock_nccl::fail_async(2, ncclRemoteError, 0);
    }
    messages.put(group.rank(), fail_of(group, device));
  });
  require_parts(messages.of(0), {"all_reduce #2", "remote process exited"});
  require_parts(messages.of(1), {"rank 0 (pid ", "failed: all_reduce #2"});
}

TEST_CASE("an operation that does not end in time names who has not come", "[nccl][failures]") {
  const auto results = fork_device_group(
      3,
      [](ProcessGroup& group, c10::Device device) -> std::string {
        group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
        if (group.rank() == 2) std::this_thread::sleep_for(seconds(3));
        return fail_of(group, device);
      },
      seconds(1));
  for (const RankResult& result : results) REQUIRE(result.ok());
  // One of the two gives up first; the other one hears of that.
  const bool zero_first = contains(results[0].text, "rank 0/3] all_reduce #2");
  require_parts(
      results[zero_first ? 0 : 1].text,
      {"all_reduce #2 float32 [16]", "timed out after 1.0 s", "rank 2 has not come to it"});
  require_parts(results[2].text, {"gave up: all_reduce #2"});
}

TEST_CASE("ranks that call different things are told both calls", "[nccl][failures]") {
  const auto results = fork_device_group(2, [](ProcessGroup& group, c10::Device device) {
    group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
    return message_of<PeerError>([&] {
      if (group.rank() == 0) {
        group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
      } else {
        at::Tensor output = at::empty({32}, at::TensorOptions().device(device));
        group.all_gather_into(output, device_tensor(1, device), kAsync)->synchronize();
      }
    });
  });
  for (const RankResult& result : results) {
    REQUIRE(result.ok());
    require_parts(result.text,
                  {"all_reduce #2 float32 [16]", "does not match", "all_gather #2 float32"});
  }
}

// Of few elements more: the rank with fewer has ended its operation, and waits in the next one.
TEST_CASE("a mismatch is told when one of the two calls has ended", "[nccl][failures]") {
  const auto results = fork_device_group(2, [](ProcessGroup& group, c10::Device device) {
    group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
    return message_of<PeerError>([&] {
      if (group.rank() == 0) {
        mock_nccl::reset();
        mock_nccl::end_alone(1, 0);
        group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
        group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
      } else {
        mock_nccl::reset();
        mock_nccl::hang(1, 1);
        at::Tensor longer = at::ones({17}, at::TensorOptions().device(device));
        group.all_reduce(longer, {}, kAsync)->synchronize();
      }
    });
  });
  for (const RankResult& result : results) {
    REQUIRE(result.ok());
    require_parts(result.text,
                  {"all_reduce #2 float32 [16]", "does not match", "all_reduce #2 float32 [17]"});
  }
}

// NCCL adds up what it is given: other dtypes of the same size, and the numbers are wrong.
TEST_CASE("a mismatch is told when both calls have ended", "[nccl][failures]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto results = fork_device_group(2, [](ProcessGroup& group, c10::Device device) {
    group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
    mock_nccl::reset();
    mock_nccl::end_alone(1, group.rank());
    const auto options = at::TensorOptions().device(device);
    const at::Tensor mine =
        at::ones({16}, options.dtype(group.rank() == 0 ? at::kFloat : at::kInt));
    group.all_reduce(mine, {}, kAsync)->synchronize();
    return fail_of(group, device);
  });
  for (const RankResult& result : results) {
    REQUIRE(result.ok());
    require_parts(result.text, {"all_reduce #2 float32 [16] SUM", "does not match",
                                "all_reduce #2 int32 [16] SUM"});
  }
  REQUIRE(std::chrono::steady_clock::now() - begin < seconds(20));
}

TEST_CASE("a rank that drops its group ends the others' device operations", "[nccl][failures]") {
  Messages messages;
  const auto begin = std::chrono::steady_clock::now();
  REQUIRE_THROWS_WITH(run_device_group(2,
                                       [&](ProcessGroup& group, c10::Device device) {
                                         group.all_reduce(device_tensor(1, device));
                                         if (group.rank() == 1) throw std::runtime_error("mine");
                                         messages.put(0, fail_of(group, device));
                                       }),
                      "mine");
  require_parts(messages.of(0), {"rank 1 (pid ", "left without destroying the group"});
  REQUIRE(std::chrono::steady_clock::now() - begin < seconds(30));
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE("what is issued while the group fails ends too", "[nccl][failures]") {
  // The first operation of a communicator: nobody who ends a group knows that one yet.
  Messages messages;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    const int rank = group.rank();
    if (rank == 0) {
      mock_nccl::hang(1, 0);
      mock_nccl::meanwhile(1, 0, [&] { group.abort("enough"); });
    }
    messages.put(rank, message_of<Error>([&] {
                   group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
                 }));
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  });
  require_parts(messages.of(0), {"the group was aborted: enough"});
  require_parts(messages.of(1), {"rank 0 (pid ", "aborted: the group was aborted: enough"});
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE("an abort ends what hangs, on all ranks", "[nccl][failures]") {
  Messages messages;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    group.all_reduce(device_tensor(1, device));
    std::thread aborts;
    if (group.rank() == 0) {
      mock_nccl::hang(2, 0);
      aborts = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(100));
        group.abort("enough");
      });
    }
    messages.put(group.rank(), fail_of(group, device));
    if (aborts.joinable()) aborts.join();
    // The streams go on, with undefined data.
    device_tensor(1, device).add_(1);
  });
  require_parts(messages.of(0), {"the group was aborted: enough"});
  require_parts(messages.of(1), {"rank 0 (pid ", "aborted: the group was aborted: enough"});
}

TEST_CASE("a rank that never sends a device tensor is named by those that wait for it",
          "[nccl][failures]") {
  Messages messages;
  run_device_group(
      3,
      [&](ProcessGroup& group, c10::Device device) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(1500));
          return messages.put(1, "");
        }
        messages.put(group.rank(), fail_of(group, device));
      },
      seconds(1));
  const bool zero_first = contains(messages.of(0), "timed out waiting for rank(s) 1");
  require_parts(messages.of(zero_first ? 0 : 2),
                {"join: timed out waiting for rank(s) 1", "must be called by all ranks"});
}

TEST_CASE("tensors of different devices are refused before anything is sent", "[nccl][failures]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const c10::Device other = fakegpu::device_at(2 + group.rank());
    at::Tensor output = at::empty({32}, at::TensorOptions().device(other));
    const std::string mixed =
        message_of<ArgumentError>([&] { group.all_gather_into(output, device_tensor(1, device)); });
    expect(contains(mixed, "another tensor of the call is on"), mixed);
    const std::string host =
        message_of<ArgumentError>([&] { group.all_gather_into(output, filled(1, 16)); });
    expect(contains(host, "argument output"), host);

    group.all_reduce(device_tensor(1, device));
    const std::string second = message_of<ArgumentError>([&] { group.all_reduce(output); });
    expect(contains(second, "a rank has one device in a group"), second);

    const std::string int16 = message_of<ArgumentError>(
        [&] { group.all_reduce(device_tensor(1, device).to(at::kShort)); });
    expect(contains(int16, "NCCL does not reduce int16"), int16);
    const std::string bits = message_of<ArgumentError>(
        [&] { group.all_reduce(device_tensor(1, device).to(at::kInt), {.op = ReduceOp::Bxor}); });
    expect(contains(bits, "NCCL has no BXOR reduction"), bits);
    const std::string any = message_of<ArgumentError>([&] {
      at::Tensor tensor = device_tensor(1, device);
      group.recv(tensor, std::nullopt);
    });
    expect(contains(any, "cannot receive from any source"), any);

    at::Tensor tensor = device_tensor(1, device);
    group.all_reduce(tensor);
    expect(first(tensor.cpu()) == 2, "the group is what it was");
  });
}

TEST_CASE("two ranks on one device are named on all ranks, unless that is asked for",
          "[nccl][failures]") {
  const auto sum_on_first = [](ProcessGroup& group) {
    const c10::Device device = fakegpu::device_at(group.rank() == 2 ? 2 : 0);
    // Streams of their own: each operation waits for the other rank's.
    const c10::StreamGuard guard(side_stream(device));
    at::Tensor tensor = device_tensor(1, device);
    group.all_reduce(tensor);
    return first(tensor.cpu());
  };
  // That of torch's own NCCL may be older (2.28 of torch 2.11).
  const int version = std::max(NCCL_VERSION_CODE, NcclApi::kSharedDeviceVersion);
  mock_nccl::set_version(version);
  Messages messages;
  run_device_group(3, [&](ProcessGroup& group, c10::Device) {
    const auto attempt = [&] { sum_on_first(group); };
    const std::string text = message_of<ArgumentError>(attempt);
    messages.put(group.rank(), text);
    const std::string again = message_of<ArgumentError>(attempt);
    expect(again == text, "the same cause: " + again);
    at::Tensor on_host = filled(1, 4);
    group.all_reduce(on_host);
    expect(first(on_host) == 3, "the host's part goes on");
  });
  for (const int rank : {0, 1, 2}) {
    const std::string& text = messages.of(rank);
    require_parts(text, {"join: ranks ", " use one device (", ":0 of machine ", "LOCAL_RANK",
                         "NCCL_MULTI_RANK_GPU_ENABLE=1"});
    REQUIRE((contains(text, "ranks 0 and 1 use") || contains(text, "ranks 1 and 0 use")));
  }
  REQUIRE(mock_nccl::calls("comm_init_rank_scalable") == 0);

  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  run_device_group(3, [&](ProcessGroup& group, c10::Device) {
    expect(sum_on_first(group) == 3, "they share it");
  });
  mock_nccl::set_version(NcclApi::kSharedDeviceVersion - 1);
  run_device_group(3, [&](ProcessGroup& group, c10::Device) {
    const std::string text = message_of<ArgumentError>([&] { sum_on_first(group); });
    expect(!contains(text, "NCCL_MULTI_RANK"), "an NCCL that does not know it: " + text);
  });
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  mock_nccl::set_version(NCCL_VERSION_CODE);
}

TEST_CASE("memory that runs out in a call leaves the group as it was", "[nccl][failures]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    const at::Tensor input = at::full({1 << 20}, 1.0, at::TensorOptions().device(device));
    std::vector<at::Tensor> parts = {at::empty_like(input), at::empty_like(input)};
    group.all_gather(parts, input);
    // The list is gathered by way of one flat tensor.
    fakegpu::set_memory_limit(device.index(), fakegpu::memory_use(device.index()).allocated_bytes);
    bool is_out_of_memory = false;
    try {
      group.all_gather(parts, input);
    } catch (const c10::OutOfMemoryError&) {
      is_out_of_memory = true;
    }
    expect(is_out_of_memory, "the allocator's own error");
    fakegpu::set_memory_limit(device.index(), -1);
    group.all_gather(parts, input);
    expect(first(parts[1].cpu()) == 1, "it goes on");
  });
}

TEST_CASE("an NCCL that is too old, or that fails to begin", "[nccl][failures]") {
  Messages messages;
  run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
    if (group.rank() == 1) mock_nccl::fail("comm_init_rank_scalable", 1, ncclInvalidUsage, 1);
    if (group.rank() == 0) mock_nccl::hang_init(0);
    messages.put(group.rank(), fail_of(group, device));
  });
  require_parts(messages.of(1), {"join on", "invalid usage", "Hint:"});
  require_parts(messages.of(0), {"rank 1 (pid ", "failed: "});
}

TEST_CASE("a killed rank is named on the others at once", "[nccl][failures]") {
  const auto results =
      fork_device_group(3, [](ProcessGroup& group, c10::Device device) -> std::string {
        group.all_reduce(device_tensor(1, device), {}, kAsync)->synchronize();
        if (group.rank() == 2) ::kill(::getpid(), SIGKILL);
        const auto begin = std::chrono::steady_clock::now();
        const std::string text = fail_of(group, device);
        expect(std::chrono::steady_clock::now() - begin < seconds(30), "soon");
        return text;
      });
  for (const int rank : {0, 1}) {
    INFO(results[rank].text);
    REQUIRE(results[rank].ok());
    require_parts(results[rank].text, {"rank 2 (pid ", "died (killed, crashed"});
  }
}
