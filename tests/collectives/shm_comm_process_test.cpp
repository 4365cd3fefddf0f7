// The communicator between processes: the same memory at different addresses, and a rank that is
// killed.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "libddp/base/error.h"
#include "libddp/collectives/shm_comm.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/folder_store.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/joined_comm.h"
#include "tests/support/messages.h"

namespace libddp::test {
namespace {

CommCall call_of(std::uint64_t sequence, std::uint64_t count) {
  return CommFixture::call(OpKind::AllReduce, sequence, Dtype::Float32, count);
}

void check_sum(JoinedComm& joined, int rank, std::uint64_t sequence, std::size_t count,
               bool in_arena) {
  std::vector<float> ordinary(in_arena ? 0 : count);
  const auto block = joined.arena->allocate(in_arena ? count * 4 : 0);
  float* data = in_arena ? reinterpret_cast<float*>(block.get()) : ordinary.data();
  for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<float>(rank + i % 50);
  joined.comm->all_reduce(call_of(sequence, count), data);
  std::size_t i = 0;
  while (i < count && data[i] == static_cast<float>(3 + 3 * (i % 50))) ++i;
  expect(i == count, "sum at element " + std::to_string(i));
}

void check_mail(JoinedComm& joined, int rank) {
  std::vector<int> out(300000, rank), in(300000, -1);
  exchange(*joined.comm, CommFixture::call(OpKind::Send, 1),
           {{.is_send = true, .peer = (rank + 1) % 3, .data = out.data(), .bytes = out.size() * 4},
            {.peer = (rank + 2) % 3, .data = in.data(), .bytes = in.size() * 4}});
  expect(in == std::vector<int>(300000, (rank + 2) % 3), "mail round the ring");
}

TEST_CASE("collectives and mail between processes") {
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    FolderStore store;
    const auto results = fork_ranks(3, [&](int rank) -> std::string {
      JoinedComm joined = join_comm(store, rank, 3, mask);
      std::uint64_t sequence = 0;
      for (std::size_t count : {1u, 300u, 70000u, 1500000u}) {
        check_sum(joined, rank, ++sequence, count, true);
        check_sum(joined, rank, ++sequence, count, false);
        check_sum(joined, rank, ++sequence, count, rank == 1);
      }
      check_mail(joined, rank);
      return "";
    });
    for (const RankResult& result : results) {
      INFO(result.text);
      REQUIRE(result.ok());
    }
  }
}

TEST_CASE("a killed rank is missed by name") {
  FolderStore store;
  const auto results = fork_ranks(2, [&](int rank) -> std::string {
    JoinedComm joined = join_comm(store, rank, 2);
    float data = 1;
    joined.comm->all_reduce(call_of(1, 1), &data);
    if (rank == 1) ::kill(::getpid(), SIGKILL);
    CommCall call = call_of(2, 1);
    call.timeout = std::chrono::milliseconds(300);
    const std::string dead = "rank 1 (pid " + std::to_string(joined.peers[1].pid);
    const auto message = message_of<TimeoutError>([&] { joined.comm->all_reduce(call, &data); });
    expect(contains(message, "all_reduce #2 float32 [1] SUM: timed out after"), message);
    expect(contains(message, dead + ", last call: all_reduce #1 float32 [1] SUM)"), message);
    return "";
  });
  REQUIRE(results[1].signal == SIGKILL);
  INFO(results[0].text);
  REQUIRE(results[0].ok());
}

}  // namespace
}  // namespace libddp::test
