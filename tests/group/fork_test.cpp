// Forked children of a rank: what outlives the rank holds nobody up, and what they write stays
// theirs.

#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Runs `f` in a child of fork() and waits for it; what it throws is this process's failure.
void in_child(const std::function<void()>& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      f();
      ::_exit(0);
    } catch (const std::exception&) {
      ::_exit(3);
    }
  }
  int status = 0;
  expect(::waitpid(child, &status, 0) == child && WIFEXITED(status), "the child ends by itself");
  expect(WEXITSTATUS(status) == 0, "the child found what it should");
}

/// Ranks 0 and 1 on hosts of their own. Rank 1 is killed while a child of it lives.
std::string lose_rank_1(const std::string& path, int rank) {
  auto store = c10::make_intrusive<c10d::FileStore>(path, 2);
  const Group group = ProcessGroup::create(store, {.rank = rank,
                                                   .world_size = 2,
                                                   .name = "test",
                                                   .timeout = std::chrono::seconds(60),
                                                   .host_identity = std::to_string(rank)});
  at::Tensor pid = at::zeros({1}, at::kLong);
  if (rank == 1) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::sleep(120);  // like a data loader's worker; rank 0 ends it
      ::_exit(0);
    }
    group->broadcast(pid.fill_(child), 1);
    ::raise(SIGKILL);
  }
  group->broadcast(pid, 1);
  std::string text;
  try {
    group->barrier();
  } catch (const std::exception& error) {
    text = error.what();
  }
  const int still_there = ::kill(static_cast<pid_t>(pid.item<std::int64_t>()), SIGKILL);
  expect(still_there == 0, "noticed while the child was alive");
  return text;
}

}  // namespace

TEST_CASE("another host is told of a killed rank though its child lives on", "[fork]") {
  // A heartbeat cannot be what tells: it would take longer than the group's timeout.
  ::setenv("LIBDDP_HEARTBEAT_TIMEOUT", "300", 1);
  TemporaryFolder folder;
  const auto results =
      fork_ranks(2, [&](int rank) { return lose_rank_1(folder.path() + "/store", rank); });
  ::unsetenv("LIBDDP_HEARTBEAT_TIMEOUT");
  INFO(results[0].text);
  REQUIRE(results[0].ok());
  REQUIRE(contains(results[0].text, "rank 1 (pid "));
  REQUIRE(contains(results[0].text, "died"));
  REQUIRE(results[1].signal == SIGKILL);
}

TEST_CASE("what a forked child writes into shared memory stays its own", "[fork]") {
  const auto results = fork_group(2, [](Group group) -> std::string {
    at::Tensor shared = group->allocate_shared({1 << 20});
    at::Tensor own = group->allocate({1 << 20});
    if (group->rank() == 0) shared.fill_(1);
    own.fill_(2);
    group->barrier();
    in_child([&] {
      expect(first(shared) == 1.0f && first(own) == 2.0f, "the child reads");
      shared.fill_(7);
      own.fill_(7);
      expect(first(shared) == 7.0f && first(own) == 7.0f, "the child reads what it wrote");
      in_child([&] { expect(first(shared) == 7.0f, "and so does its own child"); });
    });
    group->barrier();
    expect(shared.eq(1).all().item<bool>(), "no rank has what a child wrote: shared");
    expect(own.eq(2).all().item<bool>(), "no rank has what a child wrote: own");
    group->barrier();  // rank 0 has looked before rank 1 writes
    // The memory is still that of all ranks, also after the child.
    if (group->rank() == 1) shared.fill_(3);
    group->barrier();
    expect(shared.eq(3).all().item<bool>(), "ranks write for each other");
    group->all_reduce(own);
    expect(first(own) == 4.0f, "the group works");
    group->shutdown();
    return "";
  });
  for (const RankResult& result : results) {
    INFO(result.text << " signal " << result.signal);
    REQUIRE(result.ok());
  }
}
