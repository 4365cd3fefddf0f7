#include <ATen/ATen.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "tests/fakegpu/with_ranks.h"
#include "tests/support/catch.h"

namespace fakegpu::test {
namespace {

using libddp::test::expect;

ncclResult_t all_reduce(const Rank& rank, const at::Tensor& x) {
  return rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), static_cast<std::size_t>(x.numel()),
                              ncclFloat, ncclSum, rank.comm, rank.stream);
}

at::Tensor ones(const Rank& rank, std::int64_t count = 4) {
  return at::ones({count}, on_device(rank.index));
}

ncclResult_t async_error(const Rank& rank) {
  ncclResult_t error = ncclSuccess;
  require(rank.nccl.comm_get_async_error(rank.comm, &error), "comm_get_async_error");
  return error;
}

TEST_CASE_METHOD(WithNccl, "an abort ends what hangs, on every stream") {
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    const c10::Stream side = new_stream(rank.index);
    if (rank.index == 0) {  // rank 1 does not come
      require(all_reduce(rank, x), "all_reduce");
      require(rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), 4, ncclFloat, ncclSum, rank.comm,
                                   handle_of(side)),
              "all_reduce");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      expect(!default_stream(0).query(), "it hangs");
      std::thread([&] { require(rank.nccl.comm_abort(rank.comm), "comm_abort"); }).join();
      rank.synchronize();
      side.synchronize();
      expect(all_reduce(rank, x) == ncclInvalidUsage, "used after the abort");
      expect(rank.nccl.comm_abort(rank.comm) == ncclInvalidUsage, "aborted twice");
    }
  });
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE_METHOD(WithNccl, "calls that do not match hang") {
  const bool is_other_count = GENERATE(true, false);
  run_threads(2, [&](Rank& rank) {
    const at::Tensor x = ones(rank, 8);
    const std::size_t count = is_other_count && rank.index == 1 ? 7 : 8;
    if (is_other_count || rank.index == 0) {
      rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), count, ncclFloat, ncclSum, rank.comm,
                           rank.stream);
    } else {
      rank.nccl.broadcast(x.data_ptr(), x.data_ptr(), count, ncclFloat, 0, rank.comm, rank.stream);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect(!default_stream(rank.index).query(), "it hangs");
    expect(async_error(rank) == ncclSuccess, "and says nothing");
    require(rank.nccl.comm_abort(rank.comm), "comm_abort");
    rank.synchronize();
  });
}

TEST_CASE_METHOD(WithNccl, "a send and a receive on one stream can deadlock") {
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    rank.nccl.send(x.data_ptr(), 4, ncclFloat, 1 - rank.index, rank.comm, rank.stream);
    rank.nccl.recv(x.data_ptr(), 4, ncclFloat, 1 - rank.index, rank.comm, rank.stream);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect(!default_stream(rank.index).query(), "it hangs");
    require(rank.nccl.comm_abort(rank.comm), "comm_abort");
    rank.synchronize();
  });
}

TEST_CASE_METHOD(WithNccl, "calls fail on request") {
  mock_nccl::fail("all_reduce", 2, ncclSystemError, 0);
  mock_nccl::fail("comm_init_rank_scalable", 3, ncclInternalError);
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    require(all_reduce(rank, x), "first");
    if (rank.index == 0) expect(all_reduce(rank, x) == ncclSystemError, "second");
    require(all_reduce(rank, x), "third");
    rank.synchronize();
    expect(x.sum().item<float>() == 16, "two have been");
  });
  REQUIRE(mock_nccl::calls("all_reduce", 0) == 3);
  ncclUniqueId id = new_id();
  ncclComm_t comm = nullptr;
  REQUIRE(mock_nccl::api().comm_init_rank_scalable(&comm, 1, 0, 1, &id, nullptr) ==
          ncclInternalError);
  mock_nccl::reset();
  REQUIRE(mock_nccl::calls("all_reduce", 0) == 0);
}

TEST_CASE_METHOD(WithNccl, "a failure in a group is the group's") {
  mock_nccl::fail("all_reduce", 2, ncclSystemError);
  run_threads(1, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    rank.nccl.group_start();
    require(all_reduce(rank, x), "first");
    expect(all_reduce(rank, x) == ncclSystemError, "second");
    expect(rank.nccl.group_end() == ncclSystemError, "group_end");
    expect(mock_nccl::issued().empty(), "nothing was issued");
    require(all_reduce(rank, x), "afterwards");
  });
}

TEST_CASE_METHOD(WithNccl, "an operation hangs on request") {
  mock_nccl::hang(2, 1);
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    require(all_reduce(rank, x), "first");
    rank.synchronize();
    require(all_reduce(rank, x), "second");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect(!default_stream(rank.index).query(), "it hangs");
    require(rank.nccl.comm_abort(rank.comm), "comm_abort");
    rank.synchronize();
  });
}

TEST_CASE_METHOD(WithNccl, "an asynchronous error comes with its operation") {
  mock_nccl::fail_async(2, ncclRemoteError, 0);
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    require(all_reduce(rank, x), "first");
    expect(async_error(rank) == ncclSuccess, "after the first");
    require(all_reduce(rank, x), "second");
    expect(async_error(rank) == (rank.index == 0 ? ncclRemoteError : ncclSuccess), "the second's");
    rank.synchronize();
  });
}

TEST_CASE_METHOD(WithNccl, "operations take longer on request") {
  mock_nccl::delay(30);
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = ones(rank);
    const auto begin = std::chrono::steady_clock::now();
    require(all_reduce(rank, x), "all_reduce");
    rank.synchronize();
    expect(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(30), "time");
  });
}

TEST_CASE_METHOD(WithNccl, "initialisation waits for all ranks") {
  const ncclUniqueId id = new_id();
  std::atomic<bool> is_second_there{false};
  libddp::test::run_ranks(2, [&](int index) {
    ncclUniqueId mine = id;
    ncclComm_t comm = nullptr;
    if (index == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      is_second_there = true;
    }
    require(mock_nccl::api().comm_init_rank_scalable(&comm, 2, index, 1, &mine, nullptr), "init");
    expect(is_second_there, "both are there");
    require(mock_nccl::api().comm_destroy(comm), "destroy");
  });
}

TEST_CASE_METHOD(WithNccl, "initialisation in the background can be aborted") {
  ncclUniqueId id = new_id();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const libddp::NcclApi& nccl = mock_nccl::api();
  SECTION("that waits for a rank") {}
  SECTION("that hangs on request") { mock_nccl::hang_init(); }
  REQUIRE(nccl.comm_init_rank_scalable(&comm, 2, 0, 1, &id, &config) == ncclInProgress);
  ncclResult_t error = ncclSuccess;
  REQUIRE(nccl.comm_get_async_error(comm, &error) == ncclSuccess);
  REQUIRE(error == ncclInProgress);
  REQUIRE(nccl.comm_abort(comm) == ncclSuccess);
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE_METHOD(WithNccl, "a killed rank leaves the others hanging") {
  const ncclUniqueId id = new_id();
  const auto results = libddp::test::fork_ranks(3, [&](int index) -> std::string {
    run_rank(index, 3, id, [](Rank& rank) {
      const at::Tensor x = ones(rank);
      require(all_reduce(rank, x), "first");
      rank.synchronize();
      if (rank.index == 0) ::raise(SIGKILL);
      require(all_reduce(rank, x), "second");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      expect(!default_stream(rank.index).query(), "it hangs");
      require(rank.nccl.comm_abort(rank.comm), "comm_abort");
      rank.synchronize();
    });
    return "";
  });
  REQUIRE(results[0].signal == SIGKILL);
  REQUIRE(results[1].text == "");
  REQUIRE(results[2].text == "");
}

TEST_CASE_METHOD(WithNccl, "the process that made the id waits for ranks that go on") {
  int pipes[2];
  REQUIRE(::pipe(pipes) == 0);
  const auto results = libddp::test::fork_ranks(3, [&](int index) -> std::string {
    ncclUniqueId id{};
    if (index == 0) {  // as a program has it: the first rank makes the id
      id = new_id();
      for (int other = 1; other < 3; ++other)
        expect(::write(pipes[1], &id, sizeof(id)) == sizeof(id), "id sent");
    } else {
      expect(::read(pipes[0], &id, sizeof(id)) == sizeof(id), "id received");
    }
    run_rank(index, 3, id, [](Rank& rank) {
      const at::Tensor x = ones(rank, 100000);
      require(all_reduce(rank, x), "all_reduce");
      rank.synchronize();
      if (rank.index == 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const int other = 3 - rank.index;
      rank.nccl.group_start();
      rank.nccl.send(x.data_ptr(), 4, ncclFloat, other, rank.comm, rank.stream);
      rank.nccl.recv(x.data_ptr(), 4, ncclFloat, other, rank.comm, rank.stream);
      require(rank.nccl.group_end(), "group_end");
      rank.synchronize();
    });
    mock_nccl::wait_for_ranks();
    return "";
  });
  for (const auto& result : results) REQUIRE(result.text == "");
  ::close(pipes[0]);
  ::close(pipes[1]);
}

TEST_CASE_METHOD(WithNccl, "the table can be installed, and be of an old version") {
  mock_nccl::set_version(22304);
  mock_nccl::install();
  REQUIRE(libddp::NcclApi::get().version == 22304);
  REQUIRE(std::string(libddp::NcclApi::get().get_error_string(ncclRemoteError)).find("remote") ==
          0);
  mock_nccl::uninstall();
  mock_nccl::set_version(NCCL_VERSION_CODE);
  REQUIRE(mock_nccl::api().version == NCCL_VERSION_CODE);
}

}  // namespace
}  // namespace fakegpu::test
