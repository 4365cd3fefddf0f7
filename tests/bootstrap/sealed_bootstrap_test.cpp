// Bootstraps with a run key, in a store that a stranger writes to.

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/bootstrap_session.h"
#include "libddp/bootstrap/link_address.h"
#include "libddp/bootstrap/peer_info.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/bootstrap/sealed_store.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::message_of;
using libddp::test::run_ranks;

namespace {

std::shared_ptr<const RunKey> key_of(char letter) {
  return RunKey::from_bytes(std::string(32, letter));
}

/// Two ranks of two hosts unless `num_hosts` says otherwise.
BootstrapOptions sealed_options(int rank, std::shared_ptr<const RunKey> key, int num_hosts = 2) {
  BootstrapOptions options;
  options.rank = rank;
  options.world_size = 2;
  options.group_name = "test";
  options.key = std::move(key);
  options.host_identity = fmt::format("host {}", rank % num_hosts);
  return options;
}

void bootstrap_sealed(KeyValueStore& store, int rank, int num_hosts = 2) {
  const auto peers =
      bootstrap(store, sealed_options(rank, key_of('k'), num_hosts), {}, Deadline::after(60s));
  expect(peers[static_cast<std::size_t>(1 - rank)].control.get() >= 0, "the ranks met");
}

struct Quiet {
  Quiet() { set_log_level(LogLevel::Off); }
  ~Quiet() { set_log_level(LogLevel::Warn); }
};

}  // namespace

TEST_CASE("Sealed entries") {
  const Quiet quiet;
  InMemoryStore below;
  SealedStore mine(below, key_of('k'), "group a");
  mine.set("peer/0", "text\nwith lines");
  REQUIRE(mine.try_get("peer/0") == "text\nwith lines");
  REQUIRE(mine.wait_get("peer/0", Deadline::after(1s)) == "text\nwith lines");
  const std::string sealed = *below.try_get("peer/0");

  SealedStore other_key(below, key_of('w'), "group a");
  SealedStore other_context(below, key_of('k'), "group b");
  REQUIRE_FALSE(other_key.try_get("peer/0"));
  REQUIRE_FALSE(other_context.try_get("peer/0"));
  below.set("peer/1", sealed);  // moved to another place
  REQUIRE_FALSE(mine.try_get("peer/1"));
  for (const std::string& forged :
       {std::string(), std::string("plain"), sealed.substr(0, 80), sealed + "x",
        std::string(1u << 20, 'x'), "libddp-sealed-1 " + std::string(64, '0') + " text"}) {
    below.set("peer/0", forged);
    REQUIRE_FALSE(mine.try_get("peer/0"));
  }
  REQUIRE_FALSE(mine.wait_get("peer/0", Deadline::after(50ms)));
  mine.set("peer/2", "two");
  REQUIRE_FALSE(mine.try_get_all({"peer/2", "peer/0"}));
  below.set("peer/0", sealed);
  REQUIRE(mine.try_get("peer/0") == "text\nwith lines");
  REQUIRE(mine.try_get_all({"peer/2", "peer/0"}) ==
          std::vector<std::string>{"two", "text\nwith lines"});
}

TEST_CASE("Ranks with a key meet, on one host and on two") {
  for (const int num_hosts : {1, 2}) {
    InMemoryStore store;
    run_ranks(2, [&](int rank) { bootstrap_sealed(store, rank, num_hosts); });
    REQUIRE(contains(*store.try_get("peer/0"), "libddp-sealed-1 "));
  }
}

TEST_CASE("A stranger who writes to the store is not believed") {
  const Quiet quiet;
  InMemoryStore store;
  store.add("claim/0", 3);
  store.add("error_turn", 1);
  store.set("error", encode_failure({GroupFailure::Kind::Peer, "everything is lost", 1, 4711}));
  store.set("join/1", JoinEntry{"0.0.0", 1, 2, 4711, std::string(32, '0')}.encode());
  PeerInfo forged;
  forged.rank = 1;
  forged.world_size = 3;
  store.set("peer/1", forged.encode());
  LinkAddress address;
  address.endpoint = {"127.0.0.1", 9};
  store.set("link/0", address.encode());
  run_ranks(2, [&](int rank) { bootstrap_sealed(store, rank); });
}

TEST_CASE("Entries of an earlier run with the same key are not believed") {
  const Quiet quiet;
  InMemoryStore old;
  run_ranks(2, [&](int rank) { bootstrap_sealed(old, rank); });
  // A failure of an earlier run.
  InMemoryStore failed;
  const std::string message = message_of<TimeoutError>(
      [&] { bootstrap(failed, sealed_options(1, key_of('k')), {}, Deadline::after(300ms)); });
  REQUIRE(contains(message, "rank 0 (never came with this run's key)"));
  REQUIRE(contains(*failed.try_get("error"), "timed out"));

  InMemoryStore store;
  for (const char* key : {"peer/0", "peer/1", "link/0", "link/1"}) {
    store.set(key, *old.try_get(key));
  }
  store.set("error", *failed.try_get("error"));
  run_ranks(2, [&](int rank) { bootstrap_sealed(store, rank); });
}

TEST_CASE("A failure that a rank with the key tells is believed, also by who comes late") {
  InMemoryStore store;
  const std::string first = message_of<TimeoutError>(
      [&] { bootstrap(store, sealed_options(1, key_of('k')), {}, Deadline::after(200ms)); });
  const std::string message = message_of<TimeoutError>(
      [&] { bootstrap(store, sealed_options(0, key_of('k')), {}, Deadline::after(60s)); });
  REQUIRE(contains(message, "rank 0/2] bootstrap: timed out after "));
  REQUIRE(contains(message, first.substr(first.find("timed out after "))));
  REQUIRE(contains(message, "rank 0 (never came"));
}

TEST_CASE("A rank with the key that cannot begin is believed") {
  InMemoryStore store;
  refuse_bootstrap(store, sealed_options(1, key_of('k')), "no room");
  const std::string message = message_of<PeerError>(
      [&] { bootstrap(store, sealed_options(0, key_of('k')), {}, Deadline::after(60s)); });
  REQUIRE(contains(message, "rank 1 (pid "));
  REQUIRE(contains(message, "could not take part: no room"));
}

TEST_CASE("Another key: nobody joins, and the log and the timeout say so") {
  const Quiet quiet;
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    const std::string message = message_of<TimeoutError>([&] {
      bootstrap(store, sealed_options(rank, key_of(rank == 0 ? 'k' : 'w')), {},
                Deadline::after(500ms));
    });
    expect(contains(message, fmt::format("rank {} (never came with this run's key)", 1 - rank)),
           message);
  });
}

TEST_CASE("A rank without a key beside one with a key is told") {
  const Quiet quiet;
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      message_of<TimeoutError>(
          [&] { bootstrap(store, sealed_options(0, key_of('k')), {}, Deadline::after(1s)); });
      return;
    }
    const std::string message = message_of<PeerError>(
        [&] { bootstrap(store, sealed_options(1, nullptr), {}, Deadline::after(60s)); });
    expect(contains(message, "rank 0 has a run key, rank 1 (pid"), message);
    expect(contains(message, "LIBDDP_RUN_KEY_FILE"), message);
  });
}

TEST_CASE("World sizes that differ, with a key") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    BootstrapOptions options = sealed_options(rank, key_of('k'));
    options.world_size = 2 + rank;
    const std::string message =
        message_of<PeerError>([&] { bootstrap(store, options, {}, Deadline::after(60s)); });
    expect(contains(message, "has world size 2, rank 1 (pid"), message);
  });
}

TEST_CASE("Two processes with one rank, with a key") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) { bootstrap_sealed(store, rank); });
  const std::string message = message_of<PeerError>(
      [&] { bootstrap(store, sealed_options(1, key_of('k')), {}, Deadline::after(60s)); });
  REQUIRE(contains(message, "two processes call themselves rank 1: pid "));
}

TEST_CASE("require_key makes several hosts without a key an error") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    BootstrapOptions options = sealed_options(rank, nullptr);
    options.require_key = true;
    const std::string message =
        message_of<Error>([&] { bootstrap(store, options, {}, Deadline::after(60s)); });
    expect(contains(message, "the ranks are on 2 hosts and there is no run key"), message);
    expect(contains(message, "LIBDDP_RUN_KEY_FILE"), message);
  });
  InMemoryStore one_host;
  run_ranks(2, [&](int rank) {
    BootstrapOptions options = sealed_options(rank, nullptr, 1);
    options.require_key = true;
    bootstrap(one_host, options, {}, Deadline::after(60s));
  });
}

TEST_CASE("Requests name their version") {
  const JoinEntry join_entry{"1.2.3", 3, 8, 4711, std::string(32, 'a')};
  const JoinEntry same = JoinEntry::decode(join_entry.encode());
  REQUIRE(same.rank == 3);
  REQUIRE(same.nonce == join_entry.nonce);
  const std::string message =
      message_of<StoreError>([] { JoinEntry::decode("libddp-join-7 9.9.9 what ever comes then"); });
  REQUIRE(contains(message, "a rank runs libddp 9.9.9 ('libddp-join-7'), this one libddp "));
  REQUIRE_THROWS_AS(JoinEntry::decode(JoinEntry{"1.2.3", 0, 0, 0, "short"}.encode()), StoreError);
  REQUIRE_THROWS_AS(JoinEntry::decode(""), StoreError);
}
