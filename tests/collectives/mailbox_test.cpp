// Point to point: sizes and memories, order and tags, batches, errors, and all of it beside running
// collectives.

#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/collectives/shm_comm.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/messages.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {
namespace {

using namespace std::chrono_literals;
using Transfer = ShmComm::Transfer;

CommCall send_call(std::uint64_t sequence = 1) {
  return CommFixture::call(OpKind::Send, sequence, Dtype::UInt8, 1);
}

CommCall recv_call(std::uint64_t sequence = 1) {
  return CommFixture::call(OpKind::Recv, sequence, Dtype::UInt8, 1);
}

std::byte pattern(int source, int tag, std::size_t i) {
  return static_cast<std::byte>(i * 31 + static_cast<std::size_t>(source * 7 + tag) + (i >> 8));
}

void fill(std::byte* data, std::size_t bytes, int source, int tag) {
  for (std::size_t i = 0; i < bytes; ++i) data[i] = pattern(source, tag, i);
}

bool holds(const std::byte* data, std::size_t bytes, int source, int tag) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (data[i] != pattern(source, tag, i)) return false;
  }
  return true;
}

TEST_CASE("messages of every size from every memory") {
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    CommFixture fixture(2, mask);
    for (Memory memory : {Memory::Arena, Memory::Ordinary, Memory::Mixed}) {
      run_ranks(2, [&](int rank) {
        for (std::size_t bytes : {0u, 1u, 480u, 481u, 100000u, 1048576u, 5000003u}) {
          const auto block = fixture.allocate(rank, bytes, memory);
          if (rank == 0) fill(block.get(), bytes, 0, 3);
          if (rank == 0) send(fixture.comm(0), send_call(), block.get(), bytes, 1, 3);
          if (rank == 1) {
            const int source = recv(fixture.comm(1), recv_call(), block.get(), bytes, 0, 3);
            expect(source == 0, "source");
          }
          expect(holds(block.get(), bytes, 0, 3), "the message of " + std::to_string(bytes));
          // A send that has returned may be overwritten.
          std::memset(block.get(), 0, bytes);
        }
      });
    }
  }
}

TEST_CASE("one tag keeps its order, and a receive picks its tag out of many") {
  CommFixture fixture(2);
  run_ranks(2, [&](int rank) {
    constexpr int kMessages = 60;  // more than the ring of envelopes holds
    std::vector<int> values(kMessages);
    std::vector<Transfer> parts;
    if (rank == 0) {
      std::iota(values.begin(), values.end(), 100);
      for (int i = 0; i < kMessages; ++i) {
        parts.push_back({.is_send = true, .peer = 1, .tag = i % 3, .data = &values[i], .bytes = 4});
      }
      return exchange(fixture.comm(0), send_call(), parts);
    }
    for (int tag : {2, 0, 1}) {
      for (int i = tag; i < kMessages; i += 3) {
        int value = 0;
        recv(fixture.comm(1), recv_call(), &value, 4, 0, tag);
        expect(value == 100 + i, "message " + std::to_string(i));
      }
    }
  });
}

TEST_CASE("a receive from anyone tells whom it heard") {
  CommFixture fixture(3);
  run_ranks(3, [&](int rank) {
    if (rank > 0) {
      std::vector<std::byte> data(rank == 1 ? 10 : 2000000, static_cast<std::byte>(rank));
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * rank));
      return send(fixture.comm(rank), send_call(), data.data(), data.size(), 0, rank);
    }
    std::vector<std::byte> data(2000000);
    expect(recv(fixture.comm(0), recv_call(), data.data(), 2000000, -1, 2) == 2, "rank 2");
    expect(data[1999999] == std::byte{2}, "rank 2's bytes");
    expect(recv(fixture.comm(0), recv_call(), data.data(), 10, -1, 1) == 1, "rank 1");
    expect(data[9] == std::byte{1}, "rank 1's bytes");
  });
}

/// Everyone sends to everyone, itself included; the parts stand in an order that differs from rank
/// to rank.
void all_to_all(CommFixture& fixture, int rank, std::size_t bytes, Memory memory) {
  const int world_size = fixture.world_size();
  const auto out = fixture.allocate(rank, bytes * world_size, memory);
  const auto in = fixture.allocate(rank, bytes * world_size, memory);
  std::vector<Transfer> parts;
  for (int step = 0; step < world_size; ++step) {
    const int peer = rank % 2 == 0 ? step : world_size - 1 - step;
    fill(out.get() + peer * bytes, bytes, rank, peer);
    const Transfer send{.is_send = true,
                        .peer = peer,
                        .tag = peer,
                        .data = out.get() + peer * bytes,
                        .bytes = bytes};
    const Transfer recv{.peer = peer, .tag = rank, .data = in.get() + peer * bytes, .bytes = bytes};
    parts.push_back(rank % 3 == 0 ? send : recv);
    parts.push_back(rank % 3 == 0 ? recv : send);
  }
  exchange(fixture.comm(rank), send_call(), parts);
  for (int peer = 0; peer < world_size; ++peer) {
    expect(holds(in.get() + peer * bytes, bytes, peer, rank), "all to all");
  }
}

TEST_CASE("a batch runs as a whole, whatever the order of its parts") {
  for (int world_size : {1, 2, 3, 5}) {
    for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
      CommFixture fixture(world_size, mask);
      run_ranks(world_size, [&](int rank) {
        for (std::size_t bytes : {0u, 8u, 5000u, 1500000u}) {
          all_to_all(fixture, rank, bytes, Memory::Mixed);
          all_to_all(fixture, rank, bytes, Memory::Ordinary);
        }
      });
    }
  }
}

TEST_CASE("mail and collectives run side by side") {
  CommFixture fixture(2);
  std::thread collectives([&] {
    run_ranks(2, [&](int rank) {
      for (std::uint64_t sequence = 1; sequence <= 300; ++sequence) {
        std::vector<float> data(sequence * 40, 1.0f);
        fixture.comm(rank).all_reduce(
            CommFixture::call(OpKind::AllReduce, sequence, Dtype::Float32, data.size()),
            data.data());
        expect(data.back() == 2.0f, "sum");
      }
    });
  });
  run_ranks(2, [&](int rank) {
    for (std::size_t i = 1; i <= 60; ++i) all_to_all(fixture, rank, i * 997, Memory::Mixed);
  });
  collectives.join();
}

TEST_CASE("progress moves transfers without waiting") {
  CommFixture fixture(2);
  std::vector<std::byte> out(3000000), in(3000000);
  fill(out.data(), out.size(), 0, 0);
  Transfer send{.is_send = true, .peer = 1, .tag = 9, .data = out.data(), .bytes = out.size()};
  Transfer recv{.peer = -1, .tag = 9, .data = in.data(), .bytes = in.size()};
  REQUIRE_FALSE(fixture.comm(1).progress({&recv}));
  const std::uint32_t ticket = fixture.comm(1).mail_ticket();
  REQUIRE(fixture.comm(0).progress({&send}));
  fixture.comm(1).wait_for_mail(ticket, 30s);  // the envelope has notified: returns at once
  for (int round = 0; round < 20; ++round) {
    fixture.comm(1).progress({&recv});
    fixture.comm(0).progress({&send});
  }
  REQUIRE(send.is_done);
  REQUIRE(recv.is_done);
  REQUIRE(recv.source == 0);
  REQUIRE(in == out);
}

TEST_CASE("a transfer that its owner has given up is not touched again") {
  CommFixture fixture(2);
  auto send = std::make_unique<Transfer>();
  auto recv = std::make_unique<Transfer>();
  std::vector<std::byte> out(5000000), in(5000000);
  *send = {.is_send = true, .peer = 1, .tag = 1, .data = out.data(), .bytes = out.size()};
  *recv = {.peer = 0, .tag = 1, .data = in.data(), .bytes = in.size()};
  fixture.comm(0).progress({send.get()});
  fixture.comm(1).progress({recv.get()});
  fixture.comm(0).progress({send.get()});
  send.reset();
  recv.reset();
  fixture.comm(0).progress({});
  fixture.comm(1).progress({});
  REQUIRE_FALSE(fixture.comm(0).failure());
}

TEST_CASE("wake_mail and a failure end a wait for mail") {
  CommFixture fixture(2);
  const auto start = std::chrono::steady_clock::now();
  for (int how : {0, 1}) {
    const std::uint32_t ticket = fixture.comm(0).mail_ticket();
    std::thread waker([&] {
      std::this_thread::sleep_for(30ms);
      if (how == 0) fixture.comm(0).wake_mail();
      if (how == 1) fixture.comm(1).fail({.kind = GroupFailure::Kind::Aborted, .message = "why"});
    });
    fixture.comm(0).wait_for_mail(ticket, 60s);
    waker.join();
  }
  REQUIRE(std::chrono::steady_clock::now() - start < 30s);
  const auto message = message_of<PeerError>([&] { fixture.comm(0).throw_if_failed(); });
  REQUIRE(contains(message, "rank 1 (pid 1001) aborted: why"));
}

TEST_CASE("sizes that differ throw on both sides") {
  for (std::size_t sent : {16u, 4000u}) {
    CommFixture fixture(2);
    run_ranks(2, [&](int rank) {
      std::vector<std::byte> data(4000);
      const auto message = message_of<PeerError>([&] {
        if (rank == 0) send(fixture.comm(0), send_call(), data.data(), sent, 1, 5);
        if (rank == 1) recv(fixture.comm(1), recv_call(), data.data(), 32, 0, 5);
      });
      expect(contains(message, "rank 1 expects 32 bytes with tag 5 from rank 0, which sends " +
                                   std::to_string(sent) + " bytes"),
             message);
    });
  }
}

}  // namespace
}  // namespace libddp::test
