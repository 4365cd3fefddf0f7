// Every way in which a bootstrap fails: type, text, and that all ranks learn the same cause.

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/process.h"
#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/link_address.h"
#include "libddp/bootstrap/peer_info.h"
#include "libddp/transport/frame.h"
#include "libddp/transport/tcp_socket.h"
#include "libddp/transport/unix_socket.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/folder_store.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/run_ranks.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::FolderStore;
using libddp::test::fork_ranks;
using libddp::test::message_of;
using libddp::test::run_ranks;

namespace {

BootstrapOptions bare_options(int rank, int world_size) {
  return {.rank = rank, .world_size = world_size, .group_name = "test"};
}

// Far above what any of these failures may take: reaching it fails the test by its type.
Deadline far() { return Deadline::after(100s); }

std::string who(int rank) { return fmt::format("rank {} (pid {})", rank, ::getpid()); }

// A description as a rank of this process would publish it.
PeerInfo make_info(int rank, int world_size) {
  PeerInfo info;
  info.rank = rank;
  info.world_size = world_size;
  info.pid = ::getpid();
  info.host = host_name();
  info.boot_id = boot_id();
  info.network_namespace = network_namespace();
  info.pid_namespace = pid_namespace();
  info.socket_name = "libddp-nobody-listens-here";
  info.token = "token";
  return info;
}

// A store that one rank loses after a number of calls.
class BreakingStore : public KeyValueStore {
 public:
  BreakingStore(KeyValueStore& below, int num_calls) : below_(below), num_calls_(num_calls) {}

  void set(const std::string& key, const std::string& value) override {
    count();
    below_.set(key, value);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    count();
    return below_.try_get(key);
  }
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override {
    count();
    return below_.wait_get(key, deadline);
  }
  long add(const std::string& key, long amount) override {
    count();
    return below_.add(key, amount);
  }
  void remove(const std::string& key) override { below_.remove(key); }

 private:
  // The call after the last good one fails, later ones work: a broken call, not a dead store.
  void count() {
    if (num_calls_-- == 0) throw StoreError("the store broke");
  }

  KeyValueStore& below_;
  int num_calls_;
};

}  // namespace

TEST_CASE("Missing ranks are named when time is up") {
  InMemoryStore store;
  run_ranks(2, [&](int thread) {
    const int rank = thread * 2;
    const std::string message = message_of<TimeoutError>(
        [&] { bootstrap(store, bare_options(rank, 4), {}, Deadline::after(300ms)); });
    expect(contains(message,
                    fmt::format("libddp[group test, rank {}/4] bootstrap: timed out after ", rank)),
           message);
    expect(contains(message, "rank 1 (never came)"), message);
    expect(contains(message, "rank 3 (never came). Hint: "), message);
  });
}

TEST_CASE("Two processes with one rank: all fail and both pids are named") {
  FolderStore store;
  // Rank 2 never comes, so that no order of events lets the others finish first.
  const auto results = fork_ranks(3, [&](int process) -> std::string {
    const int rank = process == 2 ? 1 : process;
    try {
      bootstrap(store, bare_options(rank, 3), {}, far());
    } catch (const PeerError& error) {
      expect(error.peer_rank() == 1, "the culprit is rank 1");
      expect(error.peer_pid() > 0, "with a pid");
      return fmt::format("{} {}", ::getpid(), error.what());
    }
    return "no PeerError";
  });
  std::vector<std::string> pids;
  for (const auto& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
    REQUIRE(contains(result.text, "two processes call themselves rank 1: pid "));
    pids.push_back(result.text.substr(0, result.text.find(' ')));
  }
  for (const auto& result : results) {
    REQUIRE(contains(result.text, "pid " + pids[1]));
    REQUIRE(contains(result.text, "pid " + pids[2]));
  }
}

TEST_CASE("World sizes that differ") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    try {
      bootstrap(store, bare_options(rank, 2 + rank), {}, far());
      expect(false, "an error");
    } catch (const PeerError& error) {
      const std::string expected =
          fmt::format("{} has world size 2, {} has world size 3", who(0), who(1));
      expect(contains(error.what(), expected), error.what());
      expect(error.peer_rank() == -1, "several ranks disagree");
    }
  });
}

TEST_CASE("Agreements that differ") {
  InMemoryStore store;
  run_ranks(3, [&](int rank) {
    BootstrapOptions options = bare_options(rank, 3);
    options.agreement = rank == 1 ? "version 2" : "version 1";
    const std::string message =
        message_of<PeerError>([&] { bootstrap(store, options, {}, far()); });
    expect(contains(message, "'version 1'") && contains(message, "'version 2'"), message);
    expect(contains(message, who(1) + " has 'version 2'"), message);
  });
}

TEST_CASE("A rank that cannot begin tells the others, who come later") {
  const int refuser = GENERATE(0, 1);
  FolderStore store;
  const auto started = std::chrono::steady_clock::now();
  const auto results = fork_ranks(3, [&](int rank) -> std::string {
    if (rank == refuser) {
      refuse_bootstrap(store, bare_options(rank, 3), "LIBDDP_SOCKETS_PER_LINK='x'");
      return "refused";
    }
    std::this_thread::sleep_for(rank * 150ms);
    return message_of<PeerError>([&] { bootstrap(store, bare_options(rank, 3), {}, far()); });
  });
  REQUIRE(std::chrono::steady_clock::now() - started < 50s);
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    INFO(results[rank].text);
    REQUIRE(results[rank].ok());
    if (static_cast<int>(rank) == refuser) continue;
    REQUIRE(contains(results[rank].text, fmt::format("rank {} (pid ", refuser)));
    REQUIRE(contains(results[rank].text, "could not take part: LIBDDP_SOCKETS_PER_LINK='x'"));
  }
  // Rank 0 has waited for its hearers.
  if (refuser == 0) REQUIRE(store.add("error_heard", 0) == 2);
}

TEST_CASE("A rank on another host that cannot be reached") {
  InMemoryStore store;
  PeerInfo info = make_info(0, 2);
  info.boot_id = "another machine";
  info.host = "faraway";
  store.set("peer/0", info.encode());
  // A port that was free a moment ago: nobody listens there any more.
  const TcpEndpoint gone = TcpListener::open("127.0.0.1").endpoint();
  store.set("link/0", LinkAddress{gone, "eth7"}.encode());
  const std::string message =
      message_of<NetworkError>([&] { bootstrap(store, bare_options(1, 2), {}, far()); });
  REQUIRE(contains(message, "cannot reach rank 0 (pid "));
  REQUIRE(contains(message, "on faraway (interface eth7) at " + gone.to_string()));
  REQUIRE(contains(message, "connect: Connection refused"));
  REQUIRE(contains(message, "LIBDDP_SOCKET_IFNAME"));
}

TEST_CASE("A rank that published its description and does not answer") {
  InMemoryStore store;
  store.set("peer/0", make_info(0, 2).encode());
  const std::string message =
      message_of<PeerError>([&] { bootstrap(store, bare_options(1, 2), {}, far()); });
  REQUIRE(contains(message, who(0) + " on " + host_name() + " left before all ranks had met"));
  REQUIRE(contains(message, "connect: Connection refused"));
}

TEST_CASE("A rank that is killed before all have come") {
  FolderStore store;
  // Rank 2 never comes. Rank 1 dies in its first pause, long after its description is published.
  const auto results = fork_ranks(2, [&](int rank) -> std::string {
    if (rank == 1) set_interrupt_hook([] { ::kill(::getpid(), SIGKILL); });
    try {
      bootstrap(store, bare_options(rank, 3), {}, far());
    } catch (const PeerError& error) {
      expect(error.peer_rank() == 1 && error.peer_pid() > 0, error.what());
      return error.what();
    }
    return "no PeerError";
  });
  REQUIRE(results[1].signal == SIGKILL);
  INFO(results[0].text);
  REQUIRE(results[0].ok());
  REQUIRE(contains(results[0].text, "left before all ranks had met: "));
  REQUIRE(contains(results[0].text, "Hint: look at the output of rank 1"));
}

TEST_CASE("A mistake of one rank reaches the others") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      const std::string message =
          message_of<ArgumentError>([&] { bootstrap(store, bare_options(5, 2), {}, far()); });
      expect(contains(message, "rank 5 is not in [0, 2). Hint: check RANK"), message);
      return;
    }
    const std::string message =
        message_of<PeerError>([&] { bootstrap(store, bare_options(0, 2), {}, far()); });
    expect(contains(message, "rank 5 (pid"), message);
    expect(contains(message, "could not take part: "), message);
    expect(contains(message, "is not in [0, 2)"), message);
  });
  REQUIRE_THROWS_AS(bootstrap(store, bare_options(0, 0), {}, far()), ArgumentError);
  REQUIRE_THROWS_AS(bootstrap(store, bare_options(-1, 2), {}, far()), ArgumentError);
}

TEST_CASE("A store that one rank loses") {
  for (int num_calls : {0, 1, 2, 3}) {
    InMemoryStore store;
    run_ranks(3, [&](int rank) {
      if (rank == 2) return;  // never comes: nobody can be through before the store breaks
      if (rank == 1) {
        BreakingStore broken(store, num_calls);
        expect(message_of<StoreError>([&] { bootstrap(broken, bare_options(1, 3), {}, far()); }) ==
                   "the store broke",
               "the store's own error");
        return;
      }
      const std::string message =
          message_of<PeerError>([&] { bootstrap(store, bare_options(0, 3), {}, far()); });
      expect(contains(message, who(1) + " could not take part: the store broke"), message);
    });
  }
}

TEST_CASE("An interrupt leaves the bootstrap and is told to the others") {
  static thread_local bool is_interrupted = false;
  struct Interrupt {};
  const InterruptHook before = set_interrupt_hook([] {
    if (is_interrupted) throw Interrupt();
  });
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    is_interrupted = rank == 1;
    try {
      bootstrap(store, bare_options(rank, 3), {}, far());
      expect(false, "an exception");
    } catch (const Interrupt&) {
      expect(rank == 1, "the hook's own exception leaves");
    } catch (const PeerError& error) {
      expect(rank == 0 && contains(error.what(), "it was interrupted"), error.what());
    }
    is_interrupted = false;
  });
  set_interrupt_hook(before);
}

TEST_CASE("Strangers do not disturb a bootstrap") {
  const LogLevel level = log_level();
  set_log_level(LogLevel::Off);
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      const auto text = store.wait_get("peer/0", far());
      const PeerInfo info = PeerInfo::decode(*text);
      // All of these stand in rank 0's queue before the real rank 1.
      std::vector<UniqueFd> strangers;
      for (const std::string& request :
           {std::string("1 wrong ") + info.token, std::string("1 wrong wrong"),
            "7 wrong " + info.token, std::string("nonsense"), std::string()}) {
        strangers.push_back(connect_unix(info.socket_name, far()));
        send_frame(strangers.back().get(), request, {strangers.back().get()}, far());
      }
      connect_unix(info.socket_name, far()).reset();
    }
    const auto peers = bootstrap(store, bare_options(rank, 2), {}, far());
    expect(peers[static_cast<std::size_t>(1 - rank)].control.get() >= 0, "the ranks met");
  });
  set_log_level(level);
}

TEST_CASE("A late second claimant fails although the bootstrap is over") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) { bootstrap(store, bare_options(rank, 2), {}, far()); });
  const std::string message =
      message_of<PeerError>([&] { bootstrap(store, bare_options(1, 2), {}, far()); });
  REQUIRE(contains(message, "two processes call themselves rank 1"));
}
