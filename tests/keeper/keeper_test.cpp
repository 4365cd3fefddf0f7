#include "libddp/keeper/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <list>
#include <thread>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/random.h"
#include "libddp/slots/scatter.h"
#include "libddp/slots/snapshot_folder.h"
#include "tests/keeper/keeper_thread.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("a keeper waits for its first worker", "[keeper]") {
  KeeperThread keeper;
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  REQUIRE(!keeper.has_ended);
  REQUIRE(worker(keeper).get().empty());
}

TEST_CASE("memories outlive the connection that brought them", "[keeper]") {
  KeeperThread keeper;
  {
    KeeperClient client = worker(keeper);
    REQUIRE(client.get().empty());
    for (int i = 0; i < 2; ++i) {
      Rank rank(keeper.run, i, 2);
      rank.save(5, 0);
      client.put(rank.memory, std::nullopt);
    }
  }
  auto found = worker(keeper).get();
  REQUIRE(found.size() == 2);
  const SlotMemory memory = SlotMemory::open(std::move(found[1]));
  REQUIRE(memory.identity().rank == 1);
  REQUIRE(memory.slot(0).whole() == SavedStep{50, 5});
  verify(SlotSource(memory, 0));
}

TEST_CASE("an older layout goes when the newer one is whole", "[keeper]") {
  KeeperThread keeper;
  KeeperClient client = worker(keeper);
  Rank old(keeper.run, 0, 1, 1);
  old.save(1, 0);
  client.put(old.memory, std::nullopt);
  Rank fresh(keeper.run, 0, 1, 2);
  client.put(fresh.memory, std::nullopt);
  REQUIRE(client.get().size() == 2);
  fresh.save(2, 0);
  auto found = client.get();
  REQUIRE(found.size() == 1);
  REQUIRE(SlotMemory::open(std::move(found[0])).identity().generation == 2);
  // Starts that died before their first save leave nothing.
  for (std::uint64_t i = 3; i < 6; ++i) {
    client.put(Rank(keeper.run, 0, 1, i).memory, std::nullopt);
  }
  REQUIRE(client.get().size() == 2);
}

TEST_CASE("an older layout stays until all ranks have a save of the newer one", "[keeper]") {
  KeeperThread keeper;
  KeeperClient client = worker(keeper);
  std::list<Rank> ranks;
  const auto put = [&](int rank, int world_size, std::uint64_t generation) -> Rank& {
    Rank& made = ranks.emplace_back(keeper.run, rank, world_size, generation);
    client.put(made.memory, std::nullopt);
    return made;
  };
  for (int i = 0; i < 3; ++i) put(i, 3, 1).save(1, 0);
  // A start with fewer ranks, too.
  Rank& one = put(0, 2, 2);
  Rank& other = put(1, 2, 2);
  REQUIRE(client.get().size() == 5);
  one.save(2, 0);
  REQUIRE(client.get().size() == 5);
  other.save(2, 0);
  REQUIRE(client.get().size() == 2);
}

TEST_CASE("slots are stored while training goes on", "[keeper]") {
  KeeperThread keeper;
  TemporaryFolder folder;
  const KeeperStorage storage{
      .folder = folder.path() + "/run", .start = "a1", .keep = 1, .commits = true};
  std::list<Rank> ranks;
  std::list<KeeperClient> clients;
  for (int i = 0; i < 2; ++i) {
    ranks.emplace_back(keeper.run, i, 2);
    clients.push_back(worker(keeper));
    clients.back().put(ranks.back().memory, storage);
  }
  SnapshotFolder snapshots(storage.folder);
  for (std::uint64_t sequence = 1; sequence < 4; ++sequence) {
    const int slot = static_cast<int>(sequence % 2);
    auto client = clients.begin();
    for (Rank& rank : ranks) {
      rank.save(sequence, slot);
      (client++)->store(rank.memory, slot, storage);
    }
    clients.front().wait(0, sequence, soon());
    clients.back().wait(1, sequence, soon());
    REQUIRE(!ranks.front().memory.slot(slot).is_held());
    const auto entries = snapshots.list();
    REQUIRE(entries.size() == 1);
    REQUIRE(entries[0].saved == SavedStep{static_cast<int>(10 * sequence), sequence});
    REQUIRE(snapshots.read(entries[0]).ranks.size() == 2);
  }
  REQUIRE(contains(clients.front().status(), R"("stored":{"sequence":3,"step":30})"));
}

TEST_CASE("a slot that its writer has reserved is stored if that takes another one", "[keeper]") {
  KeeperThread keeper;
  TemporaryFolder folder;
  const KeeperStorage storage{.folder = folder.path(), .start = "a1", .keep = 9, .commits = true};
  Rank rank(keeper.run, 0, 1);
  KeeperClient client = worker(keeper);
  client.put(rank.memory, storage);
  rank.save(1, 0);
  REQUIRE(rank.memory.slot(0).try_reserve());
  client.store(rank.memory, 0, storage);
  ::usleep(100'000);
  REQUIRE(contains(client.status(), R"("num_waiting":1)"));
  REQUIRE(SnapshotFolder(storage.folder).list().empty());
  rank.memory.slot(0).unreserve();
  client.wait(0, 1, soon());
  REQUIRE(SnapshotFolder(storage.folder).list()[0].saved == SavedStep{10, 1});
  // One that is overwritten is not: the writer stores what it has put there.
  rank.save(2, 1);
  REQUIRE(rank.memory.slot(1).try_reserve());
  client.store(rank.memory, 1, storage);
  ::usleep(100'000);
  rank.save(3, 1);
  wait_until([&] { return contains(client.status(), R"("num_waiting":0)"); });
  rank.memory.slot(1).unreserve();
  client.store(rank.memory, 1, storage);
  client.wait(0, 3, soon());
  REQUIRE(SnapshotFolder(storage.folder).list().size() == 2);
}

TEST_CASE("what cannot be stored is told to every rank, and the older one stays", "[keeper]") {
  KeeperThread keeper;
  TemporaryFolder folder;
  const KeeperStorage good{.folder = folder.path(), .start = "a1", .keep = 1, .commits = true};
  KeeperStorage bad = good;
  bad.folder = "/proc/libddp";
  std::list<Rank> ranks;
  std::list<KeeperClient> clients;
  const auto store = [&](std::uint64_t sequence, const KeeperStorage& storage) {
    auto client = clients.begin();
    for (Rank& rank : ranks) {
      rank.save(sequence, 0);
      (client++)->store(rank.memory, 0, storage);
    }
  };
  for (int i = 0; i < 2; ++i) {
    ranks.emplace_back(keeper.run, i, 2);
    clients.push_back(worker(keeper));
    clients.back().put(ranks.back().memory, good);
  }
  store(1, good);
  clients.front().wait(0, 1, soon());
  store(2, bad);
  for (int i = 0; i < 2; ++i) {
    KeeperClient& client = i == 0 ? clients.front() : clients.back();
    REQUIRE(
        contains(message_of<SnapshotError>([&] { client.wait(i, 2, soon()); }), "/proc/libddp"));
  }
  REQUIRE(!ranks.back().memory.slot(0).is_held());
  REQUIRE(SnapshotFolder(good.folder).list().size() == 1);
  store(3, good);
  clients.front().wait(0, 3, soon());
  REQUIRE(SnapshotFolder(good.folder).list()[0].saved.sequence == 3);
}

TEST_CASE("a job whose agent died is ended and stored", "[keeper]") {
  const std::string run = "test-" + random_hex(8);
  TemporaryFolder folder;
  const KeeperStorage storage{.folder = folder.path(), .start = "a1", .keep = 2, .commits = true};
  int go[2];
  int ready[2];
  REQUIRE(::pipe2(go, O_CLOEXEC) == 0);
  REQUIRE(::pipe2(ready, O_CLOEXEC) == 0);
  const UniqueFd go_input(go[1]), go_output(go[0]), ready_input(ready[1]), ready_output(ready[0]);
  // Before the keeper has threads: what a child inherits of their locks stays locked.
  const pid_t agent = forked([] {
    while (true) ::pause();
  });
  const pid_t child = forked([&] {
    ::signal(SIGTERM, SIG_IGN);  // it will not go by itself
    char byte = 0;
    if (::read(go_output.get(), &byte, 1) != 1) return;
    Rank rank(run, 0, 1);
    rank.save(4, 1);
    KeeperClient client(run, {.is_worker = true, .agent = agent, .rank = 0}, soon());
    client.put(rank.memory, storage);
    // In the middle of the next save, whose slot the ranks have not agreed on.
    for (int i = 0; i < SlotMemory::kSlots; ++i) rank.memory.slot(i).try_reserve();
    [[maybe_unused]] const auto count = ::write(ready_input.get(), "x", 1);
    while (true) ::pause();
  });
  KeeperThread keeper(std::chrono::seconds(30), run);
  REQUIRE(::write(go_input.get(), "x", 1) == 1);
  pollfd entry{ready_output.get(), POLLIN, 0};
  REQUIRE(::poll(&entry, 1, 20'000) == 1);
  ::kill(agent, SIGKILL);
  int status = 0;
  wait_until([&] { return ::waitpid(agent, nullptr, WNOHANG) == agent; });
  wait_until([&] { return ::waitpid(child, &status, WNOHANG) == child; });
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGKILL);
  wait_until([&] { return SnapshotFolder(storage.folder).list().size() == 1; });
  REQUIRE(SnapshotFolder(storage.folder).list()[0].saved == SavedStep{40, 4});
  // The memory is still there for a new agent.
  REQUIRE(worker(keeper).get().size() == 1);
}

TEST_CASE("workers whose agent died before this keeper came are ended", "[keeper]") {
  const std::string run = "test-" + random_hex(8);
  int go[2];
  REQUIRE(::pipe2(go, O_CLOEXEC) == 0);
  const UniqueFd go_input(go[1]), go_output(go[0]);
  const pid_t agent = forked([] {});
  REQUIRE(::waitpid(agent, nullptr, 0) == agent);
  const pid_t child = forked([&] {
    char byte = 0;
    if (::read(go_output.get(), &byte, 1) != 1) return;
    Rank rank(run, 0, 1);
    rank.save(4, 1);
    KeeperClient client(run, {.is_worker = true, .agent = agent}, soon());
    // It is given time for this, so that its save is not lost with it.
    ::poll(nullptr, 0, 100);
    client.put(rank.memory, {});
    while (true) ::pause();
  });
  KeeperThread keeper(std::chrono::seconds(30), run);
  REQUIRE(::write(go_input.get(), "x", 1) == 1);
  int status = 0;
  wait_until([&] { return ::waitpid(child, &status, WNOHANG) == child; });
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGTERM);
  REQUIRE(worker(keeper).get().size() == 1);
}

TEST_CASE("a keeper that is not to linger waits for its first worker", "[keeper]") {
  KeeperThread keeper(std::chrono::milliseconds(0));
  ::poll(nullptr, 0, 300);
  REQUIRE(worker(keeper).get().empty());
}

TEST_CASE("a keeper ends with its job, or when nobody comes back", "[keeper]") {
  {
    KeeperThread keeper;
    {
      KeeperClient client = worker(keeper);
      client.put(Rank(keeper.run, 0, 1).memory, std::nullopt);
      client.finish();
    }
    wait_until([&] { return keeper.has_ended.load(); });
  }
  KeeperThread keeper(std::chrono::milliseconds(300));
  {
    KeeperClient client = worker(keeper);
    client.put(Rank(keeper.run, 0, 1).memory, std::nullopt);
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    REQUIRE(!keeper.has_ended);
  }
  wait_until([&] { return keeper.has_ended.load(); });
}

TEST_CASE("the newest save is stored when somebody asks", "[keeper]") {
  KeeperThread keeper;
  TemporaryFolder folder;
  const KeeperStorage storage{.folder = folder.path() + "/f", .start = "a1", .commits = true};
  KeeperClient client = worker(keeper);
  KeeperClient asking(keeper.run, {}, soon());
  const auto refusal = [&] {
    return message_of<SnapshotError>([&] { asking.store_newest(soon()); });
  };
  REQUIRE(contains(refusal(), "stores in no folder"));
  std::list<Rank> ranks;
  for (int i = 0; i < 2; ++i) {
    Rank& rank = ranks.emplace_back(keeper.run, i, 2);
    client.put(rank.memory, storage);
  }
  REQUIRE(contains(refusal(), "is whole on all of this host's ranks"));
  for (Rank& rank : ranks) rank.save(3, 0);
  ranks.front().save(4, 1);
  const auto list = [&] { return SnapshotFolder(storage.folder).list(); };

  SECTION("what all ranks have, once") {
    for (int i = 0; i < 3; ++i) {
      const std::string told = asking.store_newest(soon());
      REQUIRE(contains(told, R"("ranks":[0,1],"sequence":3,"step":30,"world_size":2)"));
      REQUIRE(contains(told, storage.folder));
      for (int rank = 0; rank < 2; ++rank) asking.wait(rank, 3, soon());
      REQUIRE(list().size() == 1);
      REQUIRE(list()[0].saved == SavedStep{30, 3});
    }
    for (Rank& rank : ranks) {
      wait_until([&] { return !rank.memory.slot(0).is_held(); });
    }
  }
  SECTION("asked for several times before it is stored") {
    for (int i = 0; i < 3; ++i) asking.store_newest(soon());
    for (int rank = 0; rank < 2; ++rank) asking.wait(rank, 3, soon());
    wait_until([&] { return contains(asking.status(), R"("num_waiting":0)"); });
    REQUIRE(!contains(asking.status(), "libddp snapshot"));
    REQUIRE(list().size() == 1);
  }
  SECTION("not while a rank is about to write it") {
    REQUIRE(ranks.back().memory.slot(0).try_reserve());
    const auto soon_over = Deadline::after(std::chrono::milliseconds(50));
    REQUIRE(contains(message_of<SnapshotError>([&] { asking.store_newest(soon_over); }),
                     "is saving. Hint: ask again"));
    REQUIRE(!ranks.front().memory.slot(0).is_held());
    ranks.back().memory.slot(0).unreserve();
    asking.store_newest(soon());
    asking.wait(1, 3, soon());
    REQUIRE(list().size() == 1);
  }
  SECTION("once more when it has failed") {
    std::ofstream(storage.folder) << "in the way";
    for (int i = 0; i < 2; ++i) {
      asking.store_newest(soon());
      for (int rank = 0; rank < 2; ++rank) {
        REQUIRE(contains(message_of<SnapshotError>([&] { asking.wait(rank, 3, soon()); }),
                         storage.folder));
      }
    }
    REQUIRE(::unlink(storage.folder.c_str()) == 0);
    asking.store_newest(soon());
    for (int rank = 0; rank < 2; ++rank) asking.wait(rank, 3, soon());
    REQUIRE(list().size() == 1);
  }
}

TEST_CASE("strangers and nonsense", "[keeper]") {
  KeeperThread keeper;
  REQUIRE_THROWS_AS(Keeper({.run = keeper.run}), NetworkError);
  REQUIRE_THROWS_AS(KeeperClient("no-such-run", {}, soon()), NetworkError);
  KeeperClient client = worker(keeper);
  REQUIRE(contains(
      message_of<SnapshotError>([&] { client.put(Rank("another", 0, 1).memory, std::nullopt); }),
      "another run"));
  Rank rank(keeper.run, 0, 1);
  rank.save(1, 0);
  const KeeperStorage storage{.folder = "/tmp", .start = "a", .commits = true};
  REQUIRE(contains(message_of<SnapshotError>([&] { client.store(rank.memory, 0, storage); }),
                   "no memory of rank 0"));
  KeeperStorage odd = storage;
  odd.start = "../a";
  REQUIRE(contains(message_of<SnapshotError>([&] { client.put(rank.memory, odd); }), "'start'"));
  for (const std::string text : {"", "{}", "[]", R"({"version":1,"call":"hello","run":"x"})"}) {
    const UniqueFd socket = connect_unix(keeper_name(keeper.run), soon());
    send_frame(socket.get(), text, {}, soon());
    const Frame reply = receive_frame(socket.get(), kKeeperLimits, soon());
    REQUIRE(!KeeperReply::decode(reply.bytes).error.empty());
  }
  const UniqueFd socket = connect_unix(keeper_name(keeper.run), soon());
  REQUIRE(::send(socket.get(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) == 18);
  wait_until([&] { return is_closed(socket.get()); });
  REQUIRE(client.get().empty());
}
