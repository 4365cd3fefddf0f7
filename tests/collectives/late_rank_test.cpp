// A rank that was frozen in a collective, and wakes when its peers have given up and gone on.

#include <fcntl.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/collectives/shm_core.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/messages.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kBlock = 1u << 20;
constexpr auto kMark = std::byte{0x5a};

struct Collective {
  const char* name;
  OpKind kind;
  std::uint64_t bytes;
  std::function<void(ShmComm&, const CommCall&, std::byte* input, std::byte* output)> run;
};

std::vector<Collective> collectives() {
  return {
      {"barrier", OpKind::Barrier, 0,
       [](ShmComm& comm, const CommCall& call, std::byte*, std::byte*) { comm.barrier(call); }},
      {"small all_reduce", OpKind::AllReduce, 64,
       [](ShmComm& comm, const CommCall& call, std::byte* input, std::byte*) {
         comm.all_reduce(call, input);
       }},
      {"all_reduce", OpKind::AllReduce, 2 * kBlock,
       [](ShmComm& comm, const CommCall& call, std::byte* input, std::byte*) {
         comm.all_reduce(call, input);
       }},
      {"reduce_scatter", OpKind::ReduceScatter, 2 * kBlock,
       [](ShmComm& comm, const CommCall& call, std::byte* input, std::byte* output) {
         comm.reduce_scatter(call, input, output, kBlock);
       }},
      {"all_gather", OpKind::AllGather, kBlock,
       [](ShmComm& comm, const CommCall& call, std::byte* input, std::byte* output) {
         comm.all_gather(call, input, output, kBlock);
       }},
      {"all_to_all", OpKind::AllToAll, 2 * kBlock,
       [](ShmComm& comm, const CommCall& call, std::byte* input, std::byte* output) {
         comm.all_to_all(call, input, output, kBlock);
       }},
      {"broadcast", OpKind::Broadcast, 2 * kBlock,
       [](ShmComm& comm, const CommCall& call, std::byte* input, std::byte*) {
         comm.broadcast(call, input, 2 * kBlock, 0);
       }},
  };
}

SharedSegment map_again(const SharedSegment& segment) {
  return SharedSegment::map(UniqueFd(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)));
}

/// What every collective of two ranks stands on.
struct Pair {
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<std::unique_ptr<ShmCore>> cores;

  Pair() {
    std::vector<SharedSegment> pages;
    for (int r = 0; r < 2; ++r) {
      arenas.push_back(Arena::create("late", 64u << 20));
      pages.push_back(ShmComm::create_page("late", 2));
    }
    for (int r = 0; r < 2; ++r) {
      ShmCommOptions options{.rank = r, .world_size = 2, .group_name = "late", .arena = arenas[r]};
      for (int peer = 0; peer < 2; ++peer) {
        ShmMember& member = options.members.emplace_back();
        member.pid = 1000 + peer;
        member.cpu_mask = ShmComm::own_cpu_mask();
        member.page = map_again(pages[peer]);
        if (peer != r) member.arena = map_again(arenas[peer]->segment());
      }
      cores.push_back(std::make_unique<ShmCore>(std::move(options)));
    }
  }
};

}  // namespace

TEST_CASE("a rank that comes when the others have given up raises, and touches nothing of theirs") {
  for (const Collective& collective : collectives()) {
    for (const Memory memory : {Memory::Arena, Memory::Ordinary}) {
      CAPTURE(collective.name, memory == Memory::Arena);
      CommFixture fixture(2, CommFixture::kOneCore);
      CommCall call =
          CommFixture::call(collective.kind, 7, Dtype::UInt8, collective.bytes, ReduceOp::Sum);
      const auto input_0 = fixture.allocate(0, 2 * kBlock, memory);
      const auto output_0 = fixture.allocate(0, 2 * kBlock, memory);
      call.timeout = 20ms;
      REQUIRE_THROWS_AS(collective.run(fixture.comm(0), call, input_0.get(), output_0.get()),
                        TimeoutError);
      // Its memory is its caller's again.
      std::memset(input_0.get(), int(kMark), 2 * kBlock);
      std::memset(output_0.get(), int(kMark), 2 * kBlock);

      const auto input_1 = fixture.allocate(1, 2 * kBlock, memory);
      const auto output_1 = fixture.allocate(1, 2 * kBlock, memory);
      call.timeout = 60s;
      const auto message = message_of<PeerError>(
          [&] { collective.run(fixture.comm(1), call, input_1.get(), output_1.get()); });
      REQUIRE(contains(message, "rank 0 (pid 1000) gave up: "));
      REQUIRE(contains(message, "#7"));
      for (std::size_t at = 0; at < 2 * kBlock; ++at) {
        if (input_0.get()[at] != kMark || output_0.get()[at] != kMark) FAIL("written at " << at);
      }
      REQUIRE_THROWS_AS(fixture.comm(1).barrier(CommFixture::call(OpKind::Barrier, 8)), PeerError);
    }
  }
}

TEST_CASE("a rank that froze between two barriers raises at each step that is left") {
  const bool at_access = GENERATE(true, false);
  Pair pair;
  const CommCall call = CommFixture::call(OpKind::AllReduce, 3, Dtype::UInt8, 4096);
  const auto begin = [&](int rank) {
    pair.cores[rank]->begin(call);
    const auto block = pair.arenas[rank]->allocate(4096);
    pair.cores[rank]->barrier(pair.cores[rank]->peers().offset_of(block.get(), 4096));
  };
  run_ranks(2, begin);
  ShmCore& late = *pair.cores[1];
  REQUIRE(late.reach(0, late.place(0), 4096) != nullptr);
  // Rank 0 has done its part and waits for the end.
  CommCall short_call = call;
  short_call.timeout = 20ms;
  pair.cores[0]->begin(short_call);
  REQUIRE_THROWS_AS(pair.cores[0]->barrier(), TimeoutError);

  int num_pieces = 0;
  const auto message = message_of<PeerError>([&] {
    if (at_access) late.reach(0, late.place(0), 4096);
    late.write_in_pieces(16u << 20, [&](std::size_t, std::size_t) { ++num_pieces; });
  });
  REQUIRE(contains(message, "rank 0 (pid 1000) gave up: "));
  REQUIRE(num_pieces == (at_access ? 0 : 1));
}

TEST_CASE("the barrier that ends a collective raises where a peer gave up in it") {
  Pair pair;
  const CommCall call = CommFixture::call(OpKind::AllReduce, 3, Dtype::UInt8, 4096);
  run_ranks(2, [&](int rank) {
    pair.cores[rank]->begin(call);
    pair.cores[rank]->barrier();
  });
  SECTION("that is, before it was complete") {
    CommCall short_call = call;
    short_call.timeout = 20ms;
    pair.cores[0]->begin(short_call);
    REQUIRE_THROWS_AS(pair.cores[0]->barrier(), TimeoutError);
    REQUIRE_THROWS_AS(pair.cores[1]->barrier(), PeerError);
  }
  SECTION("but not where the peer failed after it") {
    run_ranks(2, [&](int rank) {
      if (rank == 1) return pair.cores[1]->barrier();
      pair.cores[0]->barrier();
      pair.cores[0]->failure().fail({GroupFailure::Kind::Aborted, "enough"});
    });
    REQUIRE_THROWS_AS(pair.cores[1]->failure().throw_if_failed(nullptr), PeerError);
  }
}

TEST_CASE("once a communicator has failed its arena uses nothing again that is freed") {
  Pair pair;
  std::byte* const before = pair.arenas[0]->allocate(4096).get();
  REQUIRE(pair.arenas[0]->allocate(4096).get() == before);
  auto in_flight = pair.arenas[0]->allocate(8192);
  std::byte* const late_target = in_flight.get();
  pair.cores[0]->failure().fail({GroupFailure::Kind::Aborted, "enough"});
  in_flight.reset();
  const auto next = pair.arenas[0]->allocate(8192);
  const bool is_apart = next.get() + 8192 <= late_target || next.get() >= late_target + 8192;
  REQUIRE(is_apart);
}

TEST_CASE("a message out of a sender's memory that has given up is no message") {
  CommFixture fixture(2, CommFixture::kOneCore);
  const auto sent = fixture.allocate(0, kBlock, Memory::Arena);
  CommCall call = CommFixture::call(OpKind::Send, 1, Dtype::UInt8, kBlock);
  call.timeout = 20ms;
  REQUIRE_THROWS_AS(send(fixture.comm(0), call, sent.get(), kBlock, 1, 0), TimeoutError);
  // A frozen receiver has passed the look at its start.
  const auto received = fixture.allocate(1, kBlock, Memory::Ordinary);
  ShmComm::Transfer part{.peer = 0, .data = received.get(), .bytes = kBlock};
  REQUIRE_THROWS_AS(fixture.comm(1).progress({&part}), PeerError);
  REQUIRE_FALSE(part.is_done);
}

}  // namespace libddp::test
