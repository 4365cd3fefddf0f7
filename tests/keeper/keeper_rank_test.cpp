// Who is the worker of a rank: one process at a time, as long as it lives.

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "libddp/base/error.h"
#include "libddp/base/parent_only.h"
#include "libddp/keeper/keeper_client.h"
#include "libddp/slots/snapshot_folder.h"
#include "tests/keeper/keeper_thread.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Lets a process go on from here in another one.
class Gate {
 public:
  Gate() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    output_ = UniqueFd(ends[0]);
    input_ = UniqueFd(ends[1]);
  }
  void open() const { [[maybe_unused]] const auto count = ::write(input_.get(), "x", 1); }
  void pass() const {
    pollfd entry{output_.get(), POLLIN, 0};
    char byte = 0;
    if (::poll(&entry, 1, 20'000) != 1 || ::read(output_.get(), &byte, 1) != 1) {
      throw std::runtime_error("the gate stayed closed");
    }
  }

 private:
  UniqueFd input_;
  UniqueFd output_;
};

void end(pid_t child) {
  ::kill(child, SIGKILL);
  wait_until([&] { return ::waitpid(child, nullptr, WNOHANG) == child; });
}

[[noreturn]] void wait_for_the_end() {
  while (true) ::pause();
}

/// Of the status.
std::string worker_text(pid_t pid, int rank) {
  return fmt::format(R"({{"pid":{},"rank":{}}})", pid, rank);
}

}  // namespace

TEST_CASE("a rank has one worker at a time", "[keeper][rank]") {
  const std::string run = "test-" + random_hex(8);
  Gate go, ready;
  const pid_t first = forked([&] {
    go.pass();
    KeeperClient client(run, {.is_worker = true, .rank = 0}, soon());
    KeeperClient again(run, {.is_worker = true, .rank = 0}, soon());  // the same process
    ready.open();
    wait_for_the_end();
  });
  KeeperThread keeper(std::chrono::seconds(30), run);
  go.open();
  ready.pass();
  const auto connect = [&](int rank, std::chrono::milliseconds limit) {
    return KeeperClient(run, {.is_worker = true, .rank = rank}, Deadline::after(limit));
  };
  const std::string message =
      message_of<SnapshotError>([&] { connect(0, std::chrono::milliseconds(200)); });
  REQUIRE(contains(message, "libddp snapshot: rank 0 of run '" + run + "' is held by process " +
                                std::to_string(first)));
  REQUIRE(contains(message, "another job uses the same run or folder. Hint: end that job"));
  // Neither another rank nor a command line is in the way.
  KeeperClient other = connect(1, std::chrono::seconds(20));
  KeeperClient command_line(run, {}, soon());
  REQUIRE(contains(command_line.status(), "\"workers\":[" + worker_text(first, 0) + "," +
                                              worker_text(first, 0) + "," +
                                              worker_text(::getpid(), 1) + "]"));
  // A restarted rank comes while its process before is ending.
  std::thread ending([&] {
    ::poll(nullptr, 0, 200);
    end(first);
  });
  KeeperClient restarted = connect(0, std::chrono::seconds(20));
  ending.join();
  REQUIRE(restarted.get().empty());
}

TEST_CASE("a child that has inherited the connection is not the rank", "[keeper][rank]") {
  const std::string run = "test-" + random_hex(8);
  Gate go, ready;
  int child_of_rank[2];
  REQUIRE(::pipe2(child_of_rank, O_CLOEXEC) == 0);
  const UniqueFd from_rank(child_of_rank[0]), to_test(child_of_rank[1]);
  const pid_t rank = forked([&] {
    go.pass();
    // As a library that does not close its descriptors in children.
    const UniqueFd socket = connect_unix(keeper_name(run), soon());
    keep_in_children(socket.get());
    KeeperRequest hello{.call = KeeperRequest::Call::Hello};
    hello.run = run;
    hello.is_worker = true;
    hello.rank = 0;
    send_frame(socket.get(), hello.encode(), {}, soon());
    KeeperReply::decode(receive_frame(socket.get(), kKeeperLimits, soon()).bytes).check();
    const pid_t child = ::fork();
    if (child == 0) {
      // The test may die too.
      const pid_t test = ::getppid();
      for (int i = 0; i < 600 && test != 1; ++i) ::poll(nullptr, 0, 100);
      ::_exit(0);
    }
    [[maybe_unused]] const auto count = ::write(to_test.get(), &child, sizeof(child));
    ready.open();
    wait_for_the_end();
  });
  KeeperThread keeper(std::chrono::milliseconds(300), run);
  go.open();
  ready.pass();
  pid_t child = 0;
  REQUIRE(::read(from_rank.get(), &child, sizeof(child)) == sizeof(child));
  // With nothing to keep it would end at once.
  KeeperClient(run, {}, soon()).put(Rank(run, 0, 1).memory, std::nullopt);
  end(rank);
  REQUIRE(::kill(child, 0) == 0);
  {
    KeeperClient restarted(run, {.is_worker = true, .rank = 0}, soon());
    const std::string own = "\"workers\":[" + worker_text(::getpid(), 0) + "]";
    wait_until([&] { return contains(restarted.status(), own); });
  }
  // Nor does it keep the keeper.
  wait_until([&] { return keeper.has_ended.load(); });
  REQUIRE(::kill(child, 0) == 0);
  ::kill(child, SIGKILL);
}

TEST_CASE("a save that all hosts have is stored before one that only this one has",
          "[keeper][rank]") {
  const std::string run = "test-" + random_hex(8);
  TemporaryFolder folder;
  const KeeperStorage storage{.folder = folder.path(), .start = "a1", .keep = 2, .commits = true};
  const bool is_told = GENERATE(true, false);
  CAPTURE(is_told);
  Gate go, ready;
  const pid_t agent = forked([] { wait_for_the_end(); });
  const pid_t child = forked([&] {
    go.pass();
    Rank rank(run, 0, 1);
    rank.save(4, 0);
    rank.save(5, 1);
    KeeperClient client(run, {.is_worker = true, .agent = agent, .rank = 0}, soon());
    client.put(rank.memory, storage);
    if (is_told) {
      client.complete(3);
      client.complete(4);
    }
    ready.open();
    wait_for_the_end();
  });
  KeeperThread keeper(std::chrono::seconds(30), run);
  go.open();
  ready.pass();
  end(agent);
  wait_until([&] { return ::waitpid(child, nullptr, WNOHANG) == child; });
  const SnapshotFolder snapshots(folder.path());
  wait_until([&] { return !snapshots.list().empty(); });
  const std::uint64_t wanted = is_told ? 4 : 5;
  REQUIRE(snapshots.list().size() == 1);
  REQUIRE(snapshots.list()[0].saved.sequence == wanted);
}

TEST_CASE("a job that goes back to an older save forgets what was complete", "[keeper][rank]") {
  KeeperThread keeper;
  KeeperClient client = worker(keeper);
  const auto has = [&](const std::string& saves) {
    return contains(client.status(), "\"complete\":[" + saves + "]");
  };
  for (std::uint64_t i = 1; i < 20; ++i) client.complete(i);
  REQUIRE(has("12,13,14,15,16,17,18,19"));
  client.complete(18);  // another rank, a moment later
  REQUIRE(has("12,13,14,15,16,17,18,19"));
  client.complete(12);
  REQUIRE(has("12,13"));
}

TEST_CASE("an older layout stays until a save of the newer one is complete", "[keeper][rank]") {
  KeeperThread keeper;
  KeeperClient client = worker(keeper);
  Rank older(keeper.run, 0, 2, 1);
  older.save(1, 0);
  client.put(older.memory, std::nullopt);
  client.complete(1);
  Rank newer(keeper.run, 0, 2, 2);
  client.put(newer.memory, std::nullopt);
  newer.save(2, 0);
  // The other host's rank may not have it yet.
  REQUIRE(client.get().size() == 2);
  client.put(Rank(keeper.run, 0, 2, 3).memory, std::nullopt);
  REQUIRE(client.get().size() == 3);
  client.complete(2);
  REQUIRE(client.get().size() == 2);
}
