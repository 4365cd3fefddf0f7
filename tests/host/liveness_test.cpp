// Frozen ranks, ranks that have met errors, and ranks that only look like it.

#include <ATen/core/Tensor.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "libddp/memory/empty_cache.h"
#include "tests/support/catch.h"
#include "tests/support/heartbeat_timeout.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

namespace {

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) expect(contains(text, word), word + " in: " + text);
}

void pause(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// Rank 1 stops itself, rank 0 wakes it once it has noticed; both then know the same.
std::string freeze_rank_1(ProcessGroup& group) {
  at::Tensor tensor = filled(::getpid());
  group.broadcast(tensor, 1);
  const auto pid = static_cast<pid_t>(first(tensor));
  if (group.rank() == 1) {
    ::raise(SIGSTOP);
    while (group.failure() == nullptr) pause(5);
    expect_words(message_of<PeerError>([&] { group.barrier(); }), {"no sign of life"});
    return "";
  }
  const auto start = std::chrono::steady_clock::now();
  const std::string text = message_of<PeerError>([&] { group.all_reduce(tensor); });
  if (group.rank() == 0) ::kill(pid, SIGCONT);
  expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(20), "soon");
  expect_words(text, {"rank 1 (pid " + std::to_string(pid), "has given no sign of life for ",
                      "its last call was", "that of this rank all_reduce #2 float32 [8]",
                      "LIBDDP_HEARTBEAT_TIMEOUT"});
  return text;
}

/// What two processes tell each other beside their group.
struct Note {
  std::atomic<int> attempts_of_1{0};
  std::atomic<int> is_raised{0};
};

/// Whether this rank's all-reduce of `tensor` raised. Freezes the process in the middle of it:
/// once the other rank's first sum has come, the kernels of both are at work.
bool freeze_in_all_reduce(ProcessGroup& group, const at::Tensor& tensor) {
  std::atomic<bool> is_over{false};
  std::thread freezer([&, seen = static_cast<volatile float*>(tensor.data_ptr<float>())] {
    while (*seen != 2 && !is_over) std::this_thread::yield();
    if (!is_over) ::kill(::getpid(), SIGSTOP);
  });
  bool has_raised = false;
  try {
    group.all_reduce(tensor);
  } catch (const PeerError&) {
    has_raised = true;
  }
  is_over = true;
  freezer.join();
  return has_raised;
}

/// Until it freezes before its part is done.
std::string freeze_as_rank_1(ProcessGroup& group, Note& note, const at::Tensor& tensor) {
  for (int attempt = 1; attempt <= 30; ++attempt) {
    tensor.fill_(1);
    group.barrier();
    const bool has_raised = freeze_in_all_reduce(group, tensor);
    if (has_raised) note.is_raised = 1;
    note.attempts_of_1 = attempt;
    if (has_raised || group.failure()) return "";
  }
  throw std::runtime_error("expected: one of the attempts freezes in time");
}

/// Goes on after the failure with memory of the same group, then wakes rank 1.
std::string reuse_as_rank_0(ProcessGroup& group, Note& note, at::Tensor tensor, pid_t pid) {
  const std::int64_t numel = tensor.numel();
  for (int attempt = 1;; ++attempt) {
    tensor.fill_(1);
    group.barrier();
    bool has_failed = false;
    try {
      group.all_reduce(tensor);
    } catch (const PeerError&) {
      has_failed = true;
    }
    at::Tensor next;
    if (has_failed) {
      tensor.reset();
      empty_cache();
      next = group.allocate({numel}).fill_(-1);
    }
    wait_until([&] {
      ::kill(pid, SIGCONT);
      return note.attempts_of_1 == attempt;
    });
    if (!has_failed) continue;
    expect(note.is_raised == 1, "the late rank's call raises");
    expect(next.eq(-1).all().item<bool>(), "nobody writes into memory that is used again");
    return "";
  }
}

}  // namespace

TEST_CASE("a frozen rank is told from one that is late", "[liveness]") {
  const HeartbeatTimeout timeout("1");
  const auto results = fork_group(3, [](Group group) { return freeze_rank_1(*group); });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
  REQUIRE(contains(results[0].text, "it is stopped (SIGSTOP or Ctrl-Z)"));
}

TEST_CASE("a frozen rank of another host is noticed too", "[liveness]") {
  const HeartbeatTimeout timeout("1");
  TemporaryFolder folder;
  const auto results = fork_ranks(2, [&](int rank) {
    auto store = c10::make_intrusive<c10d::FileStore>(folder.path() + "/store", 2);
    return freeze_rank_1(*ProcessGroup::create(store, {.rank = rank,
                                                       .world_size = 2,
                                                       .name = "test",
                                                       .timeout = std::chrono::seconds(60),
                                                       .host_identity = std::to_string(rank)}));
  });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
}

TEST_CASE("without a heartbeat timeout a stopped rank is waited for", "[liveness]") {
  const HeartbeatTimeout timeout("0");
  const auto results = fork_group(2, [](Group group) -> std::string {
    at::Tensor tensor = filled(::getpid());
    group->broadcast(tensor, 1);
    if (group->rank() == 1) {
      ::raise(SIGSTOP);
    } else {
      pause(1500);
      ::kill(static_cast<pid_t>(first(tensor)), SIGCONT);
    }
    group->barrier();
    group->shutdown();
    return "";
  });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
}

TEST_CASE("ranks that are late but alive are not given up", "[liveness]") {
  const HeartbeatTimeout timeout("1");
  const auto late = [](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) pause(2500);
    group.barrier();
  };
  SECTION("on one host") { run_group(2, late); }
  SECTION("on two") { run_group_on_hosts({0, 1}, late); }
}

TEST_CASE("an error that one rank announces ends the others' wait", "[liveness]") {
  const auto body = [](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) {
      group.report_error("in forward: ValueError: no such token (train.py:31)");
      while (group.failure() == nullptr) pause(5);
      message_of<PeerError>([&] { group.barrier(); });
      return;
    }
    at::Tensor tensor = filled(1);
    const auto start = std::chrono::steady_clock::now();
    const std::string text =
        message_of<PeerError>([&] { group.all_reduce(tensor, {}, {.label = "bucket 0"}); });
    expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(30), "soon");
    expect_words(text, {"rank 1 (pid ", "in forward: ValueError: no such token (train.py:31)",
                        "all_reduce #2 float32 [8] SUM (bucket 0)"});
  };
  SECTION("on one host") { run_group(3, body); }
  SECTION("on two") { run_group_on_hosts({0, 1, 0}, body); }
}

TEST_CASE("a rank that goes on after its error is waited for", "[liveness]") {
  run_group(2, [](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) {
      group.report_error("in forward: this one is caught");
      group.retract_error();
      pause(600);
    }
    group.barrier();
    // Its next collective takes it back, too.
    if (group.rank() == 1) group.report_error("in forward: and this");
    group.barrier();
    if (group.rank() == 1) pause(600);
    group.barrier();
  });
}

TEST_CASE("an error that all ranks have met ends nothing", "[liveness]") {
  run_group(2, [](ProcessGroup& group) {
    group.barrier();
    group.report_error("in forward: the same everywhere");
    if (group.rank() == 1) pause(600);
    group.barrier();
  });
}

TEST_CASE("a rank that leaves because of an error says so", "[liveness]") {
  run_group(2, [](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) return group.report_error("KeyError: 'x' (train.py:8)");
    pause(100);
    expect_words(message_of<PeerError>([&] { group.all_reduce(filled(1)); }),
                 {"rank 1 (pid ", "has left the group", "because of an error: KeyError: 'x'"});
  });
}

TEST_CASE("a rank that wakes in a collective raises, and harms nobody", "[liveness]") {
  const HeartbeatTimeout timeout("1");
  void* const page =
      ::mmap(nullptr, sizeof(Note), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  Note& note = *new (page) Note();
  const auto results = fork_group(2, [&](Group group) {
    at::Tensor pid = filled(::getpid());
    group->broadcast(pid, 1);
    at::Tensor tensor = group->allocate({24 << 20});
    if (group->rank() == 1) return freeze_as_rank_1(*group, note, tensor);
    return reuse_as_rank_0(*group, note, std::move(tensor), static_cast<pid_t>(first(pid)));
  });
  ::munmap(page, sizeof(Note));
  for (const RankResult& result : results) {
    INFO(result.text);
    CHECK(result.ok());
  }
}

TEST_CASE("a rank that was stopped while much was said goes on", "[liveness]") {
  const HeartbeatTimeout timeout("60");
  const auto results = fork_group(2, [](Group group) -> std::string {
    at::Tensor tensor = filled(::getpid());
    group->broadcast(tensor, 1);
    if (group->rank() == 1) {
      ::raise(SIGSTOP);
      group->barrier();
    } else {
      pause(200);
      for (int i = 0; i < 500; ++i) {
        group->report_error(std::string(4000, 't'));
        group->retract_error();
      }
      ::kill(static_cast<pid_t>(first(tensor)), SIGCONT);
      pause(1500);
      group->barrier();
    }
    group->shutdown();
    return "";
  });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
}
