#include "libddp/keeper/replica_wire.h"

#include <cstring>

#include "libddp/base/error.h"
#include "libddp/keeper/rate_limit.h"
#include "libddp/keeper/replica_feed.h"
#include "tests/keeper/keeper_thread.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

namespace {

template <typename Message>
std::string problem_of(const Message& message) {
  return message_of<NetworkError>([&] { message.check(); });
}

ReplicaHead sound_head() {
  ReplicaHead head;
  head.rank = 1;
  head.world_size = 2;
  head.values_capacity = 64;
  head.values_bytes = 2;
  head.seal();
  return head;
}

}  // namespace

TEST_CASE("a request says what is asked for", "[wire]") {
  const auto request =
      ReplicaRequest::make({.run = "job 7", .rank = 2, .generation = 1, .sequence = 700});
  request.check();
  REQUIRE(request.place().run == "job 7");
  REQUIRE(request.place().rank == 2);
  REQUIRE(request.place().generation == 1);
  REQUIRE(request.place().sequence == 700);
}

TEST_CASE("every flipped bit of a request and of a head is found", "[wire]") {
  const auto request =
      ReplicaRequest::make({.run = "job 7", .rank = 2, .generation = 1, .sequence = 700});
  const ReplicaHead head = sound_head();
  head.check();
  const auto flip_each = [](const auto& message) {
    for (std::size_t bit = 0; bit < 8 * sizeof(message); ++bit) {
      auto changed = message;
      reinterpret_cast<unsigned char*>(&changed)[bit / 8] ^=
          static_cast<unsigned char>(1u << (bit % 8));
      REQUIRE_THROWS_AS(changed.check(), NetworkError);
    }
  };
  flip_each(request);
  flip_each(head);
}

TEST_CASE("what is no message says why", "[wire]") {
  ReplicaRequest request = ReplicaRequest::make({.run = "job", .rank = -1});
  REQUIRE(problem_of(request) == "it asks for no rank of a run");
  request.version = 3;
  REQUIRE(problem_of(request) == "it speaks version 3 of replicas, this is version 2");
  request.magic = 0;
  REQUIRE(problem_of(request) == "it sent something else");
  const auto refused = [](auto change) {
    ReplicaHead head = sound_head();
    change(head);
    head.seal();
    return problem_of(head);
  };
  const std::string sizes = "its sizes are those of no snapshot";
  REQUIRE(refused([](ReplicaHead& head) { head.layout_bytes = 1ull << 40; }) == sizes);
  REQUIRE(refused([](ReplicaHead& head) { head.data_bytes = ~0ull; }) == sizes);
  REQUIRE(refused([](ReplicaHead& head) { head.values_bytes = 65; }) == sizes);
  REQUIRE(refused([](ReplicaHead& head) { head.values_capacity = 1ull << 60; }) == sizes);
  REQUIRE(refused([](ReplicaHead& head) { head.rank = 2; }) == sizes);
  REQUIRE(refused([](ReplicaHead& head) { head.outcome = static_cast<ReplicaOutcome>(7); }) ==
          sizes);
  REQUIRE(refused([](ReplicaHead& head) {
            head.outcome = ReplicaOutcome::Refused;
            head.reason_bytes = 1u << 20;
          }) == "its refusal is too long");
}

TEST_CASE("a save that is lost while it is sent is said to be", "[wire]") {
  Rank rank("job", 0, 1, 0, 2 * kChunkBytes);
  rank.save(1, 0);
  auto memory = std::make_shared<SlotMemory>(std::move(rank.memory));
  ReplicaFeed feed(HeldSave::of(memory, 0));
  REQUIRE(memory->slot(0).is_held());
  feed.advance(feed.rest().size());
  const auto state = [&] {
    ChunkHead head;
    REQUIRE(feed.rest().size() == sizeof(head));
    std::memcpy(&head, feed.rest().data(), sizeof(head));
    return head.state;
  };
  REQUIRE(state() == ChunkState::Comes);
  feed.advance(sizeof(ChunkHead));
  REQUIRE(feed.rest().size() == kChunkBytes);
  memory->slot(0).discard();  // by a writer that does not ask
  feed.advance(kChunkBytes);
  REQUIRE(state() == ChunkState::Lost);
  feed.advance(sizeof(ChunkHead));
  REQUIRE(feed.rest().empty());
}

TEST_CASE("a slot is held once for each that reads it", "[wire]") {
  Rank rank("job", 0, 1);
  rank.save(1, 0);
  auto memory = std::make_shared<SlotMemory>(std::move(rank.memory));
  {
    HeldSave one = HeldSave::of(memory, 0);
    const HeldSave other = HeldSave::of(memory, 0);
    HeldSave moved = std::move(one);
    REQUIRE((moved && other));
    moved = HeldSave();
    REQUIRE(!memory->slot(0).try_reserve());
    REQUIRE(!HeldSave::of(memory, 1));
  }
  REQUIRE(memory->slot(0).try_reserve());
  REQUIRE(!HeldSave::of(memory, 0));
  memory->slot(0).unreserve();
}

TEST_CASE("a rate of nothing is none, and a low one still moves", "[wire]") {
  RateLimit none(0);
  none.spend(1u << 30);
  REQUIRE(none.allowed() > 1u << 30);
  RateLimit low(5);
  wait_until([&] { return low.allowed() > 0; });
  low.spend(1);
  REQUIRE(low.allowed() == 0);
  REQUIRE(low.pause() <= std::chrono::milliseconds(1001));
}
