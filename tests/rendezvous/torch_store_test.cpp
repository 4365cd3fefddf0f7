// A c10d store as the core's; one that does not answer: every call ends in time and names it.

#include "libddp/rendezvous/torch_store.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "libddp/base/error.h"
#include "libddp/group/process_group.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<std::uint8_t>;

/// A store whose server is gone.
class LostStore : public c10d::HashStore {
 public:
  using Store::compareSet;

  Bytes compareSet(const std::string&, const Bytes&, const Bytes&) override {
    throw std::runtime_error("Connection reset by peer\nstack trace");
  }
};

/// Another process takes back what this one has just found.
class FleetingStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    const bool is_there = HashStore::check(keys);
    for (const std::string& key : keys) deleteKey(key);
    return is_there;
  }
};

/// Answers nothing while it is shut.
class ShutStore : public c10d::FileStore {
 public:
  using FileStore::FileStore;

  using Store::compareSet;

  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& next) override {
    while (is_shut) std::this_thread::sleep_for(1ms);
    return FileStore::compareSet(key, current, next);
  }

  std::atomic<bool> is_shut{true};
};

void open(ShutStore& store, TorchStore& client) {
  store.is_shut = false;
  const Deadline deadline = Deadline::after(60s);
  while (true) {
    try {
      client.try_get("key");
      return;
    } catch (const Error&) {
      REQUIRE_FALSE(deadline.expired());
      std::this_thread::sleep_for(1ms);
    }
  }
}

}  // namespace

TEST_CASE("a c10d store serves as key-value store", "[store]") {
  auto below = c10::make_intrusive<c10d::HashStore>();
  TorchStore store(below, "mine/");
  REQUIRE_FALSE(store.try_get("key").has_value());
  REQUIRE_FALSE(store.wait_get("key", Deadline::after(std::chrono::milliseconds(5))).has_value());
  store.set("key", std::string("a\0b", 3));
  REQUIRE(store.try_get("key") == std::string("a\0b", 3));
  REQUIRE(below->check({"mine/key"}));
  REQUIRE(store.add("count", 2) == 2);
  REQUIRE(store.add("count", 3) == 5);
  store.remove("key");
  REQUIRE_FALSE(store.try_get("key").has_value());
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      expect(store.wait_get("late", Deadline::never()) == "value", "waits");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      store.set("late", "value");
    }
  });
}

TEST_CASE("a key that is removed meanwhile is there or not, in every store", "[store]") {
  TemporaryFolder folder;
  auto fleeting = c10::make_intrusive<FleetingStore>();
  fleeting->setTimeout(100ms);
  c10d::TCPStoreOptions served;
  served.port = 0;
  served.isServer = true;
  for (const c10::intrusive_ptr<c10d::Store>& below :
       {c10::intrusive_ptr<c10d::Store>(std::move(fleeting)),
        c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", served)),
        c10::intrusive_ptr<c10d::Store>(
            c10::make_intrusive<c10d::FileStore>(folder.path() + "/store", 1))}) {
    TorchStore store(below, "mine/", {.deadline = Deadline::after(60s)});
    REQUIRE_FALSE(store.try_get("key").has_value());
    REQUIRE_FALSE(store.try_get("key").has_value());  // asking has left nothing
    store.set("key", "value");
    REQUIRE(store.try_get("key") == "value");
    REQUIRE(store.try_get("key") == "value");
    store.set("key", "");
    REQUIRE(store.try_get("key") == "");
    store.remove("key");
    REQUIRE_FALSE(store.try_get("key").has_value());
  }
}

TEST_CASE("a lost store is a StoreError of one line", "[store]") {
  TorchStore store(c10::make_intrusive<LostStore>(), "mine/");
  const std::string text = message_of<StoreError>([&] { store.try_get("key"); });
  REQUIRE(contains(text, "failed to get key 'mine/key': Connection reset by peer. Hint:"));
  REQUIRE_FALSE(contains(text, "stack trace"));
}

TEST_CASE("a store that does not answer is left at the deadline, and refused after it", "[store]") {
  TemporaryFolder folder;
  auto below = c10::make_intrusive<ShutStore>(folder.path() + "/store", -1);
  TorchStore store(below, "mine/", {.deadline = Deadline::after(100ms)});
  const auto start = std::chrono::steady_clock::now();
  const std::string text = message_of<TimeoutError>([&] { store.try_get("key"); });
  REQUIRE(std::chrono::steady_clock::now() - start < 30s);
  REQUIRE(
      contains(text, "the rendezvous store in file " + folder.path() + "/store did not answer"));
  REQUIRE(contains(text, "to get key 'mine/key'"));
  // Also for other groups over it.
  TorchStore other(below, "other/");
  const std::string refused = message_of<StoreError>([&] { other.set("key", "value"); });
  REQUIRE(contains(refused, "cannot be used: a call to it has had no answer for "));
  open(*below, other);
  other.set("key", "value");
  REQUIRE(other.try_get("key") == "value");
}

TEST_CASE("what a caller's look throws ends a call to a store", "[store]") {
  TemporaryFolder folder;
  auto below = c10::make_intrusive<ShutStore>(folder.path() + "/store", -1);
  TorchStore store(below, "mine/", {.look = [] { throw StateError("the group failed"); }});
  REQUIRE(message_of<StateError>([&] { store.try_get("key"); }) == "the group failed");
  TorchStore other(below, "other/");
  open(*below, other);
}

TEST_CASE("a store that was only slow is told why its caller left", "[store]") {
  TemporaryFolder folder;
  auto below = c10::make_intrusive<ShutStore>(folder.path() + "/store", -1);
  bool has_looked = false;
  TorchStore store(below, "mine/", {.look = [&] {
                     if (!std::exchange(has_looked, true)) throw StateError("interrupted");
                   }});
  REQUIRE(message_of<StateError>([&] { store.try_get("key"); }) == "interrupted");
  std::thread answer([&] {
    std::this_thread::sleep_for(100ms);
    below->is_shut = false;
  });
  store.set("error", "why");
  answer.join();
  REQUIRE(store.try_get("error") == "why");
}

TEST_CASE("making a group ends in time where the store does not answer", "[store]") {
  TemporaryFolder folder;
  auto below = c10::make_intrusive<ShutStore>(folder.path() + "/store", -1);
  const auto start = std::chrono::steady_clock::now();
  const std::string text = message_of<TimeoutError>([&] {
    ProcessGroup::create(below, {.rank = 1, .world_size = 2, .name = "test", .timeout = 500ms});
  });
  REQUIRE(std::chrono::steady_clock::now() - start < 30s);
  REQUIRE(contains(text, "the rendezvous store in file "));
  TorchStore other(below, "other/");
  open(*below, other);
}
