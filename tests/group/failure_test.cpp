// What survivors see when a rank dies, aborts, disagrees, is late or leaves. Ranks are processes
// where death or fork matters, threads otherwise.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/base/interrupt.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;
using Clock = std::chrono::steady_clock;

namespace {

/// Process ids of all ranks, by rank.
std::vector<pid_t> exchange_pids(ProcessGroup& group) {
  at::Tensor all = at::zeros({group.size()}, at::kLong);
  group.all_gather_into(all, at::full({1}, static_cast<std::int64_t>(::getpid()), at::kLong));
  std::vector<pid_t> pids;
  for (int rank = 0; rank < group.size(); ++rank) {
    pids.push_back(static_cast<pid_t>(all[rank].item<std::int64_t>()));
  }
  return pids;
}

/// Messages that tests look into must hold all of these.
void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) expect(contains(text, part), part + " in: " + text);
}

void require_all_ok(const std::vector<RankResult>& results, int except = -1) {
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    if (static_cast<int>(rank) == except) continue;
    INFO("rank " << rank << ": " << results[rank].text << " signal " << results[rank].signal);
    REQUIRE(results[rank].ok());
  }
}

}  // namespace

TEST_CASE("survivors of a killed rank name it, and nothing is left behind", "[failure]") {
  const auto before = list_folder("/dev/shm");
  const auto results = fork_group(4, [](Group group) -> std::string {
    const std::vector<pid_t> pids = exchange_pids(*group);
    if (group->rank() == 2) ::raise(SIGKILL);
    const auto start = Clock::now();
    at::Tensor tensor = filled(1);
    const auto call = [&] { group->all_reduce(tensor, {}, {.label = "bucket 7"}); };
    const std::string text = message_of<PeerError>(call);
    expect(Clock::now() - start < std::chrono::seconds(20), "at once");
    expect_parts(text, {"libddp[group test, rank " + std::to_string(group->rank()) + "/4]",
                        "rank 2 (pid " + std::to_string(pids[2]), "died", "all_reduce #2 float32",
                        "Hint: "});
    expect_parts(message_of<PeerError>(call), {"rank 2 (pid " + std::to_string(pids[2])});
    expect(group->failure() != nullptr, "the group has failed");
    return text;
  });
  REQUIRE(results[2].signal == SIGKILL);
  require_all_ok(results, 2);
  const auto after = list_folder("/dev/shm");
  for (const std::string& name : after) {
    INFO(name);
    REQUIRE((before.count(name) == 1 || name.find("libddp") == std::string::npos));
  }
}

TEST_CASE("a rank killed anywhere in a collective is noticed", "[failure]") {
  for (const int delay_ms : {1, 9}) {
    const auto results = fork_group(3, [=](Group group) -> std::string {
      at::Tensor arena = group->allocate({1 << 20});
      at::Tensor ordinary = filled(0, 1 << 20);
      arena.fill_(0);
      group->barrier();
      std::thread killer;
      if (group->rank() == 1) {
        killer = std::thread([=] {
          std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
          ::kill(::getpid(), SIGKILL);
        });
      }
      const std::string text = message_of<PeerError>([&] {
        while (true) {
          group->all_reduce(arena);
          group->all_reduce(ordinary);
        }
      });
      if (killer.joinable()) killer.join();
      expect_parts(text, {"rank 1 (pid "});
      return text;
    });
    REQUIRE(results[1].signal == SIGKILL);
    require_all_ok(results, 1);
  }
}

TEST_CASE("a killed peer ends asynchronous work and receives", "[failure]") {
  // Else rank 0 may hear of the death before it has posted anything.
  int posted[2];
  REQUIRE(::pipe(posted) == 0);
  const auto results = fork_group(2, [&](Group group) -> std::string {
    char byte = 0;
    if (group->rank() == 1) {
      static_cast<void>(!::read(posted[0], &byte, 1));
      ::raise(SIGKILL);
    }
    at::Tensor first = filled(1);
    at::Tensor second = filled(1);
    const WorkPtr receive = group->recv(first, 1, 0, {.async = true});
    const WorkPtr reduce = group->all_reduce(second, {}, {.async = true});
    expect(::write(posted[1], &byte, 1) == 1, "the pipe takes a byte");
    expect_parts(message_of<PeerError>([&] { receive->wait(); }), {"rank 1 (pid "});
    expect_parts(message_of<PeerError>([&] { reduce->wait(); }), {"rank 1 (pid "});
    return "";
  });
  ::close(posted[0]);
  ::close(posted[1]);
  REQUIRE(results[1].signal == SIGKILL);
  require_all_ok(results, 1);
}

TEST_CASE("a forked child cannot use the group and does not disturb it", "[failure]") {
  const auto results = fork_group(2, [](Group group) -> std::string {
    at::Tensor tensor = filled(1);
    group->all_reduce(tensor, {}, {.async = true})->wait();  // threads are running
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        const std::string text = message_of<StateError>([&] { group->barrier(); });
        expect_parts(text, {"barrier", "before this process", "forked"});
        message_of<StateError>([&] { group->shutdown(); });
        group.reset();  // as at the child's exit
        ::_exit(0);
      } catch (const std::exception&) {
        ::_exit(3);
      }
    }
    int status = 0;
    expect(::waitpid(child, &status, 0) == child && WIFEXITED(status), "the child ends");
    expect(WEXITSTATUS(status) == 0, "the child saw StateError");
    group->all_reduce(tensor);
    expect(tensor[0].item<float>() == 4.0f, "the parent goes on");
    group->shutdown();
    return "";
  });
  require_all_ok(results);
}

TEST_CASE("a killed rank is noticed though its child holds the sockets", "[failure]") {
  const auto results = fork_group(2, [](Group group) -> std::string {
    at::Tensor pid = at::zeros({1}, at::kLong);
    if (group->rank() == 1) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::sleep(10);  // like a data loader's worker; rank 0 ends it
        ::_exit(0);
      }
      group->broadcast(pid.fill_(child), 1);
      ::raise(SIGKILL);
    }
    group->broadcast(pid, 1);
    const std::string text = message_of<PeerError>([&] { group->barrier(); });
    const int still_there = ::kill(static_cast<pid_t>(pid.item<std::int64_t>()), SIGKILL);
    expect(still_there == 0, "noticed while the child held the sockets");
    expect_parts(text, {"rank 1 (pid ", "died"});
    return "";
  });
  REQUIRE(results[1].signal == SIGKILL);
  require_all_ok(results, 1);
}

TEST_CASE("abort reaches everyone with its reason", "[failure]") {
  run_group(3, [](ProcessGroup& group) {
    at::Tensor tensor = filled(1);
    if (group.rank() == 1) {
      group.abort("loss is NaN");
      expect_parts(message_of<StateError>([&] { group.barrier(); }), {"aborted: loss is NaN"});
    } else {
      expect_parts(message_of<PeerError>([&] { group.all_reduce(tensor); }),
                   {"rank 1 (pid ", "loss is NaN"});
      expect_parts(message_of<PeerError>([&] { group.recv(tensor, 1); }), {"loss is NaN"});
    }
  });
}

TEST_CASE("who leaves because of a failure is not taken for its cause", "[failure]") {
  // Rank 0 may hear of rank 1's leaving before it hears of rank 2's abort.
  for (int i = 0; i < 40; ++i) {
    run_group(3, [](ProcessGroup& group) {
      if (group.rank() == 2) return group.abort("loss is NaN");
      const std::string text = message_of<PeerError>([&] { group.all_reduce(filled(1)); });
      expect_parts(text, {"rank 2 (pid ", "loss is NaN"});
      if (group.rank() == 1) group.shutdown();
    });
  }
}

TEST_CASE("abort wakes a waiting thread of the same rank", "[failure]") {
  run_group(2, [](ProcessGroup& group) {
    if (group.rank() == 1) {
      expect_parts(message_of<PeerError>([&] { group.barrier(); }), {"enough"});
      return;
    }
    at::Tensor tensor = filled(1);
    const WorkPtr receive = group.recv(tensor, 1, 9, {.async = true});
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group.abort("enough");
    });
    expect_parts(message_of<StateError>([&] { receive->wait(); }), {"enough"});
    aborter.join();
  });
}

TEST_CASE("abort ends a shutdown that waits", "[failure]") {
  run_group(2, [](ProcessGroup& group) {
    if (group.rank() == 1) {
      expect_parts(message_of<PeerError>([&] { group.barrier(); }), {"rank 0 (pid ", "enough"});
      return;
    }
    at::Tensor tensor = filled(1);
    const WorkPtr receive = group.recv(tensor, 1, 9, {.async = true});
    std::atomic<bool> is_over{false};
    std::thread aborter([&] {
      while (!is_over && !receive->is_completed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        try {
          group.abort("enough");
        } catch (const StateError&) {
          // Not as long as the shutdown waits: the test would hang here until its timeout.
        }
      }
    });
    const auto start = Clock::now();
    group.shutdown();
    is_over = true;
    aborter.join();
    expect(Clock::now() - start < std::chrono::seconds(30), "the shutdown ends");
    expect_parts(message_of<StateError>([&] { receive->wait(); }), {"enough"});
    expect_parts(message_of<StateError>([&] { group.abort("late"); }), {"has been shut down"});
  });
}

TEST_CASE("a rank that is gone without shutdown is a failure", "[failure]") {
  // The exception of one rank drops its group; the others must not hang.
  std::atomic<int> num_told{0};
  const auto body = [&](ProcessGroup& group) {
    if (group.rank() == 1) throw std::runtime_error("bug in rank 1");
    const std::string text = message_of<PeerError>([&] { group.barrier(); });
    expect_parts(text, {"rank 1 (pid ", "without destroying the group"});
    ++num_told;
  };
  REQUIRE_THROWS_WITH(run_group(3, body), "bug in rank 1");
  REQUIRE(num_told == 2);
}

TEST_CASE("a group that goes out of scope at the end is left in order", "[failure]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> has_left{false};
  run_ranks(2, [&](int rank) {
    Group group = ProcessGroup::create(store, {.rank = rank, .world_size = 2, .name = "by itself"});
    group->all_reduce(filled(1, 50000));
    if (rank == 0) {
      group.reset();
      has_left = true;
      return;
    }
    wait_until([&] { return has_left.load(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    expect(group->failure() == nullptr, "nothing has failed");
    expect_parts(message_of<PeerError>([&] { group->barrier(); }),
                 {"rank 0 (pid ", "has left the group", "after all_reduce"});
  });
}

TEST_CASE("groups may be dropped while their peers say goodbye", "[failure]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](int rank) {
    for (int round = 0; round < 60; ++round) {
      Group group = ProcessGroup::create(store, {.rank = rank,
                                                 .world_size = 3,
                                                 .name = "dropped " + std::to_string(round),
                                                 .timeout = std::chrono::seconds(60)});
      group->barrier();
      // One leaves in order, one with a receive in flight, one in between.
      if (rank == round % 3) {
        group->shutdown();
      } else if (rank == (round + 1) % 3) {
        try {
          const WorkPtr receive = group->recv(filled(0), rank == 0 ? 1 : 0, 5, {.async = true});
          group.reset();
          receive->wait();
        } catch (const Error&) {
          // Another rank may have dropped the group already; only the end of it counts here.
        }
      }
    }
  });
}

TEST_CASE("ranks that drop their groups after the last call see no error", "[failure]") {
  const auto last_calls = [](ProcessGroup& group) {
    at::Tensor tensor = filled(1, 50000);
    group.all_reduce(tensor);
    group.barrier();
  };
  SECTION("threads") {
    auto store = c10::make_intrusive<c10d::HashStore>();
    run_ranks(3, [&](int rank) {
      for (int round = 0; round < 20; ++round) {
        last_calls(*ProcessGroup::create(store, {.rank = rank,
                                                 .world_size = 3,
                                                 .name = std::to_string(round),
                                                 .timeout = std::chrono::seconds(60)}));
      }
    });
  }
  SECTION("processes") {
    require_all_ok(fork_group(3, [&](Group group) -> std::string {
      last_calls(*group);
      return "";
    }));
  }
}

TEST_CASE("a timeout names who did not come", "[failure]") {
  run_group(3, [](ProcessGroup& group) {
    at::Tensor tensor = filled(1);
    const CallOptions options{.timeout = std::chrono::milliseconds(300)};
    if (group.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      while (group.failure() == nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      expect_parts(message_of<Error>([&] { group.all_reduce(tensor); }), {"timed out"});
      return;
    }
    // The other waiting rank may hear of it before its own time is over.
    const std::string text = message_of<Error>([&] { group.all_reduce(tensor, {}, options); });
    expect_parts(text, {"all_reduce #1 float32 [8]", "timed out after ", "rank 2 (pid "});
  });
}

TEST_CASE("a receive that nobody answers times out", "[failure]") {
  run_group(2, [](ProcessGroup& group) {
    if (group.rank() == 1) {
      while (group.failure() == nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    at::Tensor tensor = filled(1);
    const std::string text = message_of<TimeoutError>(
        [&] { group.recv(tensor, 1, 5, {.timeout = std::chrono::milliseconds(100)}); });
    expect_parts(text, {"recv", "timed out after ", "waiting for rank 1 (pid "});
  });
}

TEST_CASE("ranks that call different things are told both calls", "[failure]") {
  const auto mismatch = [](const std::function<void(ProcessGroup&)>& call,
                           const std::vector<std::string>& parts) {
    run_group(2, [&](ProcessGroup& group) {
      expect_parts(message_of<PeerError>([&] { call(group); }), parts);
      expect(group.failure() != nullptr, "poisoned");
      message_of<PeerError>([&] { group.barrier(); });
    });
  };
  const auto numel = [](ProcessGroup& group) { return 4 + group.rank(); };
  mismatch([&](ProcessGroup& g) { g.all_reduce(filled(1, numel(g))); },
           {"all_reduce #1 float32 [4]", "all_reduce #1 float32 [5]"});
  mismatch([](ProcessGroup& g) { g.all_reduce(at::zeros({4}, g.rank() ? at::kInt : at::kFloat)); },
           {"int32 [4]", "float32 [4]"});
  mismatch(
      [](ProcessGroup& g) {
        g.all_reduce(filled(1), {.op = g.rank() ? ReduceOp::Max : ReduceOp::Sum});
      },
      {"MAX", "SUM"});
  mismatch([](ProcessGroup& g) { g.broadcast(filled(1), g.rank()); }, {"broadcast #1"});
  mismatch(
      [](ProcessGroup& g) {
        if (g.rank() == 0) {
          g.barrier();
        } else {
          g.all_reduce(filled(1));
        }
      },
      {"barrier #1", "all_reduce #1 float32 [8]"});
  mismatch([&](ProcessGroup& g) { g.gather({}, filled(1, numel(g)), 1 - g.rank()); },
           {"gather #1 float32 [4]", "gather #1 float32 [5]"});
  mismatch(
      [](ProcessGroup& g) {
        // Two sums of equal shape in swapped order differ in nothing but their labels; other shapes
        // are caught.
        g.all_reduce(filled(1, g.rank() == 0 ? 3 : 7));
        g.all_reduce(filled(1, g.rank() == 0 ? 7 : 3));
      },
      {"all_reduce #1 float32 [3]", "all_reduce #1 float32 [7]"});
}

TEST_CASE("a collective after a peer has left names it", "[failure]") {
  run_group(3, [](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) return;  // shuts down in order
    const std::string text = message_of<PeerError>([&] { group.all_reduce(filled(1)); });
    expect_parts(text, {"all_reduce #2", "rank 1 (pid ", "has left the group", "barrier #1"});
  });
}

namespace {

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

std::atomic<bool> interrupt_now{false};
thread_local bool is_interruptible = false;

void interrupt_hook() {
  if (interrupt_now && is_interruptible) throw Interrupted();
}

}  // namespace

TEST_CASE("an interrupt leaves a waiting collective and ends the group", "[failure]") {
  const InterruptHook before = set_interrupt_hook(interrupt_hook);
  interrupt_now = true;
  run_group(2, [](ProcessGroup& group) {
    at::Tensor tensor = filled(1);
    if (group.rank() == 0) {
      is_interruptible = true;
      message_of<Interrupted>([&] { group.all_reduce(tensor); });
      is_interruptible = false;
      message_of<StateError>([&] { group.barrier(); });
    } else {
      while (group.failure() == nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      expect_parts(message_of<PeerError>([&] { group.all_reduce(tensor); }),
                   {"rank 0 (pid ", "interrupted"});
    }
  });
  interrupt_now = false;
  set_interrupt_hook(before);
}

TEST_CASE("an interrupt leaves a shutdown that waits, and the peers learn why", "[failure]") {
  const InterruptHook before = set_interrupt_hook(interrupt_hook);
  interrupt_now = true;
  run_group(2, [](ProcessGroup& group) {
    at::Tensor tensor = filled(1);
    if (group.rank() == 0) {
      const WorkPtr work = group.all_reduce(filled(1), {}, {.async = true});
      is_interruptible = true;
      message_of<Interrupted>([&] { group.shutdown(); });
      is_interruptible = false;
      expect_parts(message_of<StateError>([&] { work->wait(); }), {"interrupted"});
    } else {
      expect_parts(message_of<PeerError>([&] { group.recv(tensor, 0); }),
                   {"rank 0 (pid ", "the shutdown was interrupted"});
    }
  });
  interrupt_now = false;
  set_interrupt_hook(before);
}
