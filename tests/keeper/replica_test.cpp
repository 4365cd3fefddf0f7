// Saves that one host's keeper fetches from another's, and what may go wrong on the way.

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <random>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/keeper/keeper_client.h"
#include "libddp/keeper/replica_wire.h"
#include "libddp/slots/scatter.h"
#include "tests/keeper/keeper_thread.h"
#include "tests/keeper/proxy.h"
#include "tests/keeper/two_hosts.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

namespace {

/// What this process logs from WARN on.
class CapturedLog {
 public:
  CapturedLog() : before_(::dup(STDERR_FILENO)) {
    const UniqueFd file(::open(path_.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600));
    ::dup2(file.get(), STDERR_FILENO);
    set_log_level(LogLevel::Warn);
  }
  ~CapturedLog() {
    set_log_level(LogLevel::Off);
    ::dup2(before_.get(), STDERR_FILENO);
  }

  std::string text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int count(const std::string& event) const {
    int found = 0;
    const std::string all = text();
    for (auto at = all.find(event); at != std::string::npos; at = all.find(event, at + 1)) ++found;
    return found;
  }

 private:
  TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/log";
  const UniqueFd before_;
};

/// Handshake replies and head, then the layout's text, values and checksums.
constexpr std::uint64_t kHandshakeBytes = 2 * 44;

}  // namespace

TEST_CASE("a keeper holds what it has pulled", "[replica]") {
  TwoHosts hosts(3 * kChunkBytes / 2);
  hosts.remote.save(5, 0);
  hosts.pull(5);
  REQUIRE(hosts.replicas() == Sequences{5});
  auto found = hosts.here->get();
  REQUIRE(found.size() == 1);
  const SlotMemory memory = SlotMemory::open(std::move(found[0]));
  REQUIRE(memory.identity().run == hosts.run);
  REQUIRE(memory.identity().rank == 1);
  REQUIRE(memory.identity().world_size == 2);
  REQUIRE(memory.identity().generation == 3);
  REQUIRE(memory.layout().text() == hosts.remote.memory.layout().text());
  REQUIRE(memory.values_capacity() == hosts.remote.memory.values_capacity());
  REQUIRE(memory.slot(0).whole() == SavedStep{50, 5});
  REQUIRE(memory.slot(0).values() == "{}");
  const auto copied = memory.slot(0).data();
  const auto source = hosts.remote.memory.slot(0).data();
  REQUIRE(std::equal(copied.begin(), copied.end(), source.begin(), source.end()));
  // The next one goes beside it, the one after that in its place.
  for (std::uint64_t sequence = 6; sequence < 10; ++sequence) {
    hosts.remote.save(sequence, static_cast<int>(sequence % 2));
    hosts.pull(sequence);
    REQUIRE(hosts.replicas() == Sequences{sequence - 1, sequence});
    REQUIRE(hosts.here->get().size() == 1);
  }
  REQUIRE(!hosts.remote.memory.slot(0).is_held());
  REQUIRE(!hosts.remote.memory.slot(1).is_held());
  REQUIRE(
      contains(hosts.here->status(), R"("replicas":[{"bytes":6291456,"error":"","generation":3)"));
  REQUIRE(contains(hosts.here->status(), "\"address\":\"127.0.0.1:"));
}

TEST_CASE("replicas outlive the host that they are of", "[replica]") {
  TwoHosts hosts;
  hosts.remote.save(5, 0);
  hosts.pull(5);
  hosts.there.reset();
  hosts.end_second();
  REQUIRE(hosts.replicas() == Sequences{5});
  // What is here needs no network.
  hosts.pull(5);
  hosts.remote.save(6, 1);
  REQUIRE(
      contains(hosts.failed_pull(6), "could not be pulled from " + hosts.address + ": connect"));
  REQUIRE(hosts.replicas() == Sequences{5});
  // Rank 1 starts anew here.
  hosts.here->pull(hosts.address, 1, 3, 5, PullPurpose::Own);
  REQUIRE(contains(hosts.here->status(), "\"replicas\":[]"));
  REQUIRE(hosts.replicas() == Sequences{5});
}

TEST_CASE("memory may be pulled for a rank that comes to this host", "[replica]") {
  TwoHosts hosts;
  hosts.remote.save(5, 0);
  hosts.here->pull(hosts.address, 1, 3, 5, PullPurpose::Own);
  hosts.here->wait_pull(1, 3, 5, soon());
  REQUIRE(contains(hosts.here->status(), "\"replicas\":[]"));
  REQUIRE(hosts.replicas() == Sequences{5});
}

TEST_CASE("empty tensors and large values are pulled, too", "[replica]") {
  TwoHosts hosts(0);
  hosts.remote.save(5, 0);
  hosts.pull(5);
  REQUIRE(hosts.replicas() == Sequences{5});
}

TEST_CASE("what is not there is refused with what is", "[replica]") {
  TwoHosts hosts;
  REQUIRE(contains(hosts.failed_pull(5), "libddp snapshot: rank 1 could not be pulled from " +
                                             hosts.address +
                                             ": save 5 of rank 1, layout 3, is not there; the "
                                             "saves there: none."));
  hosts.remote.save(6, 0);
  hosts.remote.save(7, 1);
  REQUIRE(contains(hosts.failed_pull(5), "the saves there: 6, 7."));
  hosts.here->pull(hosts.address, 0, 3, 5);
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(0, 3, 5, soon()); }),
                   "save 5 of rank 0"));
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(7, 3, 5, soon()); }),
                   "nothing was to be pulled"));
  for (const std::string odd : {"", "here", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", ":1",
                                "127.0.0.1:70000", "::1:7", "[127.0.0.1]:7", "127.0.0.1:1x"}) {
    REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->pull(odd, 1, 3, 7); }),
                     "is no address of a keeper"));
  }
  REQUIRE(hosts.replicas().empty());
}

TEST_CASE("an address of a keeper is read as it is written", "[replica]") {
  for (const std::string text : {"10.0.0.1:4711", "[fd00::1]:65535"}) {
    REQUIRE(parse_endpoint(text).to_string() == text);
  }
}

TEST_CASE("a keeper listens once, with one key", "[replica]") {
  TwoHosts hosts;
  REQUIRE(hosts.there->listen("127.0.0.1", *key_of('k')) == hosts.address);
  REQUIRE(
      contains(message_of<SnapshotError>([&] { hosts.there->listen("127.0.0.1", *key_of('x')); }),
               "listens with another run key already"));
  REQUIRE(
      contains(message_of<SnapshotError>([&] { hosts.there->listen("127.0.0.2", *key_of('k')); }),
               "the keeper listens at " + hosts.address + " already, not at '127.0.0.2'"));
  KeeperThread other;
  KeeperClient client = worker(other);
  REQUIRE(contains(message_of<SnapshotError>([&] { client.pull(hosts.address, 1, 3, 5); }),
                   "has no run key to show to other hosts"));
  REQUIRE(contains(message_of<SnapshotError>([&] { client.listen("no-such-if", *key_of('k')); }),
                   "no-such-if"));
  REQUIRE(contains(message_of<SnapshotError>([&] { client.listen("192.0.2.1", *key_of('k')); }),
                   "the keeper cannot listen at 192.0.2.1: bind"));
  REQUIRE(contains(client.listen("lo", *key_of('k')), ":"));
}

TEST_CASE("nobody without the key gets a byte of a save", "[replica]") {
  TwoHosts hosts(5000, {.run = "", .patience = kShortPatience});
  hosts.remote.save(5, 0);
  const TcpEndpoint endpoint = parse_endpoint(hosts.address);
  // Neither another key, nor the same for another run.
  for (const bool has_key : {false, true}) {
    KeeperThread stranger(Keeper::Options{
        .run = has_key ? "test-" + random_hex(8) : hosts.run, .host = "c", .patience = kPatience});
    KeeperClient client = worker(stranger);
    client.listen("127.0.0.1", *key_of(has_key ? 'k' : 'x'));
    client.pull(hosts.address, 1, 3, 5);
    REQUIRE(contains(message_of<SnapshotError>([&] { client.wait_pull(1, 3, 5, soon()); }),
                     "it does not accept this rank's proof: another run, or another run key"));
    REQUIRE(client.get().empty());
  }
  // Nor who speaks of something else, or says nothing.
  const UniqueFd socket = connect_tcp(endpoint, soon());
  const ReplicaRequest request =
      ReplicaRequest::make({.run = hosts.run, .rank = 1, .generation = 3, .sequence = 5});
  send_bytes(socket.get(), &request, sizeof(request), soon());
  char byte = 0;
  REQUIRE_THROWS_AS(receive_bytes(socket.get(), &byte, 1, soon()), NetworkError);
  const UniqueFd silent = connect_tcp(endpoint, soon());
  REQUIRE_THROWS_AS(receive_bytes(silent.get(), &byte, 1, soon()), NetworkError);
  hosts.pull(5);
}

TEST_CASE("a holder may die at any byte", "[replica]") {
  TwoHosts hosts(2 * kChunkBytes + 77);
  Proxy proxy(hosts.address);
  hosts.remote.save(5, 0);
  hosts.pull(5, proxy.address());
  const std::uint64_t all = proxy.num_bytes;
  REQUIRE(all > 2 * kChunkBytes);
  std::mt19937_64 random(1);
  for (std::uint64_t place = 0; place < 32; ++place) {
    // The first ones in handshake and head, then all over.
    proxy.close_at = place < 16 ? kHandshakeBytes + place * 16 : 1 + random() % (all - 1);
    if (place == 31) proxy.close_at = all - 1;
    CAPTURE(proxy.close_at.load());
    hosts.remote.save(6 + place, 1);
    const std::string message = hosts.failed_pull(6 + place, proxy.address());
    REQUIRE(
        contains(message, "libddp snapshot: rank 1 could not be pulled from " + proxy.address()));
    REQUIRE(hosts.replicas() == Sequences{5});
  }
  proxy.close_at = Proxy::kNever;
  hosts.pull(37, proxy.address());
  REQUIRE(hosts.replicas() == Sequences{5, 37});
  wait_until([&] { return !hosts.remote.memory.slot(1).is_held(); });
}

TEST_CASE("a bit that flips on the way is found, and named", "[replica]") {
  TwoHosts hosts(2 * kChunkBytes + 77);
  Proxy proxy(hosts.address);
  hosts.remote.save(5, 0);
  hosts.pull(5, proxy.address());
  const std::uint64_t all = proxy.num_bytes;
  hosts.remote.save(6, 1);
  // In the second of three chunks.
  proxy.flip_at = all - kChunkBytes;
  const std::string message = hosts.failed_pull(6, proxy.address());
  REQUIRE(contains(message,
                   "bytes 4194304 to 8388608 have another checksum than when they were stored "
                   "(bytes 4194304 to 8388608 of 'w')"));
  REQUIRE(hosts.replicas() == Sequences{5});
  // Nothing of what comes goes unseen.
  std::mt19937_64 random(1);
  const std::uint64_t opening = all - (2 * kChunkBytes + 77) - 3 * sizeof(ChunkHead);
  for (int trial = 0; trial < 60; ++trial) {
    proxy.flip_at = trial < 40 ? random() % opening : random() % all;
    CAPTURE(proxy.flip_at.load());
    REQUIRE(contains(hosts.failed_pull(6, proxy.address()), "could not be pulled"));
    REQUIRE(hosts.replicas() == Sequences{5});
  }
  proxy.flip_at = Proxy::kNever;
  hosts.pull(6, proxy.address());
  REQUIRE(hosts.replicas() == Sequences{5, 6});
}

TEST_CASE("a holder that freezes is given up, with all that waits for it", "[replica]") {
  TwoHosts hosts(2 * kChunkBytes, {.run = "", .patience = kShortPatience});
  Proxy proxy(hosts.address);
  hosts.remote.save(5, 0);
  hosts.pull(5);
  hosts.remote.save(6, 1);
  proxy.freeze_at = kChunkBytes;
  hosts.here->pull(proxy.address(), 1, 3, 6);
  hosts.here->pull(proxy.address(), 0, 3, 6);  // waits behind it
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(1, 3, 6, soon()); }),
                   "it sent nothing for 2 s"));
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(0, 3, 6, soon()); }),
                   "it sent nothing for 2 s"));
  REQUIRE(proxy.num_connections == 1);
  REQUIRE(hosts.replicas() == Sequences{5});
  // The holder lets go of the slot.
  wait_until([&] { return !hosts.remote.memory.slot(1).is_held(); });
}

TEST_CASE("what goes wrong is in the log once", "[replica]") {
  TwoHosts hosts(2 * kChunkBytes, {.run = "", .patience = kShortPatience});
  Proxy proxy(hosts.address);
  hosts.remote.save(5, 0);
  const CapturedLog captured;
  proxy.freeze_at = kChunkBytes;
  for (int i = 0; i < 2; ++i) {
    hosts.here->pull(proxy.address(), 1, 3, 5);
    hosts.here->pull(proxy.address(), 0, 3, 5);  // waits behind it
    for (const int rank : {1, 0}) {
      REQUIRE(
          contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(rank, 3, 5, soon()); }),
                   "it sent nothing for 2 s"));
    }
  }
  REQUIRE(captured.count("event=replica_not_pulled") == 1);
  REQUIRE(contains(captured.text(), "level=WARN"));
  REQUIRE(contains(captured.text(), "rank=1"));
  // Strangers: by the holder, with their number.
  KeeperThread stranger(Keeper::Options{.run = hosts.run, .host = "c", .patience = kPatience});
  KeeperClient client = worker(stranger);
  client.listen("127.0.0.1", *key_of('x'));
  client.pull(hosts.address, 1, 3, 5);
  REQUIRE_THROWS_AS(client.wait_pull(1, 3, 5, soon()), SnapshotError);
  wait_until([&] { return captured.count("event=link_refused") == 1; });
  REQUIRE(contains(captured.text(), "endpoint=" + hosts.address));
  REQUIRE(contains(captured.text(), "reason=\"wrong proof\" num_refused=1"));
}

TEST_CASE("a puller that freezes does not keep the slot", "[replica]") {
  TwoHosts hosts(8 * kChunkBytes, {.run = "", .patience = kShortPatience});
  hosts.remote.save(5, 0);
  KeeperThread slow(Keeper::Options{.run = hosts.run, .host = "c", .patience = kPatience});
  KeeperClient client = worker(slow);
  client.listen("127.0.0.1", *key_of('k'));
  Proxy proxy(hosts.address);
  proxy.freeze_at = kChunkBytes;
  client.pull(proxy.address(), 1, 3, 5);
  wait_until([&] { return hosts.remote.memory.slot(0).is_held(); });
  // Others are served meanwhile.
  hosts.pull(5);
  wait_until([&] { return !hosts.remote.memory.slot(0).is_held(); });
}

TEST_CASE("a keeper that ends does not wait for a frozen one", "[replica]") {
  TwoHosts hosts(8 * kChunkBytes, {.run = "", .patience = 60s});
  hosts.remote.save(5, 0);
  Proxy proxy(hosts.address);
  proxy.freeze_at = kChunkBytes;
  hosts.here->pull(proxy.address(), 1, 3, 5);
  wait_until([&] { return proxy.num_bytes == kChunkBytes; });
  const auto begin = std::chrono::steady_clock::now();
  hosts.end_first();
  REQUIRE(std::chrono::steady_clock::now() - begin < 30s);
  // Its connection is closed, so the slot is free at once.
  wait_until([&] { return !hosts.remote.memory.slot(0).is_held(); });
}

TEST_CASE("a slow holder is waited for", "[replica]") {
  TwoHosts hosts(300'000, {.run = "", .patience = 1s});
  Proxy proxy(hosts.address);
  proxy.piece_bytes = 128;
  hosts.remote.save(5, 0);
  const auto begin = std::chrono::steady_clock::now();
  hosts.pull(5, proxy.address());
  REQUIRE(std::chrono::steady_clock::now() - begin > 1s);
  REQUIRE(hosts.replicas() == Sequences{5});
}

TEST_CASE("a rate is kept, over all that are served", "[replica]") {
  TwoHosts hosts(400'000, {.run = "", .bytes_per_second = 1'000'000, .patience = kPatience});
  hosts.remote.save(5, 0);
  KeeperThread third(Keeper::Options{.run = hosts.run, .host = "c", .patience = kPatience});
  KeeperClient client = worker(third);
  client.listen("127.0.0.1", *key_of('k'));
  const auto begin = std::chrono::steady_clock::now();
  client.pull(hosts.address, 1, 3, 5);
  hosts.pull(5);
  client.wait_pull(1, 3, 5, soon());
  // 800 KB, of which a tenth of a second's may go at once.
  REQUIRE(std::chrono::steady_clock::now() - begin > 600ms);
  REQUIRE(hosts.replicas() == Sequences{5});
}

TEST_CASE("a replica that does not fit is refused with numbers", "[replica]") {
  std::atomic<std::uint64_t> left{1u << 20};
  TwoHosts hosts(4u << 20, {.run = "", .patience = kPatience, .memory_limit = [&] {
                              return MemoryLimit{.available_bytes = left, .source = "the machine"};
                            }});
  hosts.remote.save(5, 0);
  const std::string message = hosts.failed_pull(5);
  REQUIRE(contains(message, "it needs 4194"));
  REQUIRE(contains(message, "bytes of memory, the machine has 1048576 left. Hint: fewer replicas"));
  REQUIRE(hosts.replicas().empty());
  left = 6u << 20;
  hosts.pull(5);
  // The second slot takes memory, too, and the third save does not.
  left = 1u << 20;
  hosts.remote.save(6, 1);
  REQUIRE(contains(hosts.failed_pull(6), "it needs 4194304 bytes of memory"));
  REQUIRE(hosts.replicas() == Sequences{5});
  left = 6u << 20;
  hosts.pull(6);
  left = 1u << 20;
  hosts.remote.save(7, 0);
  hosts.pull(7);
  REQUIRE(hosts.replicas() == Sequences{6, 7});
}

TEST_CASE("a replica that is being read is not overwritten", "[replica]") {
  TwoHosts hosts;
  hosts.remote.save(5, 0);
  hosts.pull(5);
  auto found = hosts.here->get();
  SlotMemory memory = SlotMemory::open(std::move(found[0]));
  REQUIRE(memory.slot(0).try_hold());
  hosts.remote.save(6, 1);
  hosts.pull(6);
  hosts.remote.save(7, 0);
  hosts.pull(7);  // into memory of its own
  REQUIRE(memory.slot(0).whole() == SavedStep{50, 5});
  verify(SlotSource(memory, 0));
  memory.slot(0).release();
  REQUIRE(hosts.replicas() == Sequences{7});
}

TEST_CASE("a writer waits for no puller, nor the other way round", "[replica]") {
  TwoHosts hosts(8 * kChunkBytes, {.run = "", .patience = kShortPatience});
  Proxy proxy(hosts.address);
  proxy.freeze_at = kChunkBytes;
  hosts.remote.save(5, 0);
  hosts.here->pull(proxy.address(), 1, 3, 5);
  wait_until([&] { return hosts.remote.memory.slot(0).is_held(); });
  REQUIRE(!hosts.remote.memory.slot(0).try_reserve());
  REQUIRE(hosts.remote.memory.slot(1).try_reserve());
  hosts.remote.save(6, 1);
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(1, 3, 5, soon()); }),
                   "it sent nothing"));
  // Not for long.
  REQUIRE(contains(hosts.failed_pull(6), "its writer has the slot reserved"));
  hosts.remote.memory.slot(1).unreserve();
  hosts.pull(6);
  REQUIRE(hosts.replicas() == Sequences{6});
}

TEST_CASE("a save whose slot is reserved comes if the writer takes another one", "[replica]") {
  TwoHosts hosts(5000, {.run = "", .patience = kPatience});
  hosts.remote.save(5, 0);
  hosts.remote.save(6, 1);
  for (int i = 0; i < 2; ++i) REQUIRE(hosts.remote.memory.slot(i).try_reserve());
  hosts.here->pull(hosts.address, 1, 3, 5);
  ::usleep(100'000);
  REQUIRE(hosts.here->pulled({1}, 3, 5) == Pulled::Coming);
  hosts.remote.memory.slot(0).unreserve();
  hosts.here->wait_pull(1, 3, 5, soon());
  REQUIRE(hosts.replicas() == Sequences{5});
  // And is refused if it takes that one.
  hosts.here->pull(hosts.address, 1, 3, 6);
  ::usleep(100'000);
  hosts.remote.save(7, 1);
  REQUIRE(contains(message_of<SnapshotError>([&] { hosts.here->wait_pull(1, 3, 6, soon()); }),
                   "save 6 of rank 1, layout 3, is not there; the saves there: 5, 7."));
  hosts.remote.memory.slot(1).unreserve();
}

TEST_CASE("what a writer had reserved that is gone is lent", "[replica]") {
  TwoHosts hosts(5000, {.run = "", .patience = kShortPatience});
  const auto writer = [&] {
    return KeeperClient(hosts.run, {.is_worker = true, .rank = 1, .host = "b"}, soon());
  };
  std::optional<KeeperClient> one(writer());
  std::optional<KeeperClient> other(writer());
  hosts.remote.save(5, 0);
  Slot& slot = hosts.remote.memory.slot(0);
  REQUIRE(slot.try_reserve());
  REQUIRE(contains(hosts.failed_pull(5), "its writer has the slot reserved"));
  // As long as one of them may be writing.
  one.reset();
  for (int i = 0; i < 2; ++i) other->status();
  REQUIRE(!slot.try_hold());
  other.reset();
  wait_until([&] { return slot.try_hold(); });
  slot.release();
  hosts.pull(5);
  REQUIRE(hosts.replicas() == Sequences{5});
}

TEST_CASE("a replica that a worker writes on is one memory with its readers", "[replica]") {
  TwoHosts hosts(8 * kChunkBytes, {.run = "", .patience = kShortPatience});
  hosts.remote.save(5, 0);
  hosts.pull(5);
  SlotMemory memory = SlotMemory::open(std::move(hosts.here->get()[0]));
  // Another host reads it when the rank comes to this one.
  KeeperThread third(Keeper::Options{.run = hosts.run, .host = "c", .patience = kPatience});
  KeeperClient client = worker(third);
  client.listen("127.0.0.1", *key_of('k'));
  Proxy proxy(hosts.own_address);
  proxy.freeze_at = kChunkBytes;
  client.pull(proxy.address(), 1, 3, 5);
  wait_until([&] { return memory.slot(0).is_held(); });
  hosts.here->put(memory, std::nullopt);
  REQUIRE(memory.slot(0).is_held());
  wait_until([&] { return !memory.slot(0).is_held(); });
  REQUIRE(memory.slot(0).try_reserve());
}

TEST_CASE("replicas of an older layout go with the newer one", "[replica]") {
  TwoHosts hosts;
  hosts.remote.save(5, 0);
  hosts.pull(5);
  Rank newer(hosts.run, 1, 2, 4);
  newer.save(6, 0);
  hosts.there->put(newer.memory, std::nullopt);
  hosts.here->pull(hosts.address, 1, 4, 6);
  hosts.here->wait_pull(1, 4, 6, soon());
  REQUIRE(hosts.replicas() == Sequences{6});
  // And when this host's own ranks have left that layout.
  Rank own(hosts.run, 0, 2, 5);
  own.save(7, 0);
  hosts.here->put(own.memory, std::nullopt);
  REQUIRE(hosts.here->get().size() == 1);
}

TEST_CASE("many saves of many ranks are pulled one after another", "[replica]") {
  TwoHosts hosts;
  std::list<Rank> ranks;
  for (int i = 2; i < 20; ++i) {
    ranks.emplace_back(hosts.run, i, 20, 3).save(5, 0);
    hosts.there->put(ranks.back().memory, std::nullopt);
    // The older request for a rank gives way.
    hosts.here->pull(hosts.address, i, 3, 4);
    hosts.here->pull(hosts.address, i, 3, 5);
  }
  for (int i = 2; i < 20; ++i) hosts.here->wait_pull(i, 3, 5, soon());
  REQUIRE(hosts.here->get().size() == 18);
}
