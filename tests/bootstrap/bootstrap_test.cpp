#include "libddp/bootstrap/bootstrap.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/base/files.h"
#include "libddp/memory/shared_segment.h"
#include "libddp/transport/frame.h"
#include "libddp/transport/unix_socket.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/folder_store.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/run_ranks.h"
#include "tests/support/soon.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::expect;
using libddp::test::FolderStore;
using libddp::test::fork_ranks;
using libddp::test::run_ranks;
using libddp::test::soon;

namespace {

BootstrapOptions options_of(int rank, int world_size) {
  return {.rank = rank,
          .world_size = world_size,
          .group_name = "test",
          .agreement = "layout 1",
          .note = "note of " + std::to_string(rank)};
}

// Two segments per rank, each holding the rank and its index.
std::vector<SharedSegment> make_segments(int rank) {
  std::vector<SharedSegment> segments;
  for (int index = 0; index < 2; ++index) {
    segments.push_back(SharedSegment::create("libddp-test", 4096));
    segments.back().data()[0] = static_cast<std::byte>(rank);
    segments.back().data()[1] = static_cast<std::byte>(index);
  }
  return segments;
}

void check_peers(std::vector<GroupPeer>& peers, int own_rank) {
  for (int rank = 0; rank < static_cast<int>(peers.size()); ++rank) {
    GroupPeer& peer = peers[static_cast<std::size_t>(rank)];
    expect(peer.rank == rank && peer.pid > 0 && !peer.host.empty(), "peers are ordered by rank");
    expect(peer.note == "note of " + std::to_string(rank), "the note arrives");
    if (rank == own_rank) {
      expect(!peer.control && !peer.process && peer.descriptors.empty(),
             "nothing for the own rank");
      continue;
    }
    expect(peer.descriptors.size() == 2, "two descriptors per peer");
    for (int index = 0; index < 2; ++index) {
      UniqueFd& fd = peer.descriptors[static_cast<std::size_t>(index)];
      const SharedSegment segment = SharedSegment::map(std::move(fd));
      expect(segment.data()[0] == static_cast<std::byte>(rank), "the peer's own segment");
      expect(segment.data()[1] == static_cast<std::byte>(index), "in the peer's order");
    }
  }
}

// Each end of each connection says who it is.
void check_connections(const std::vector<GroupPeer>& peers, int own_rank) {
  for (const GroupPeer& peer : peers) {
    if (peer.control) send_frame(peer.control.get(), std::to_string(own_rank), {}, soon());
  }
  for (const GroupPeer& peer : peers) {
    if (!peer.control) continue;
    const Frame frame = receive_frame(peer.control.get(), FrameLimits{}, soon());
    expect(frame.bytes == std::to_string(peer.rank), "the connection leads to the right rank");
  }
}

void bootstrap_and_check(KeyValueStore& store, int rank, int world_size) {
  const std::vector<SharedSegment> segments = make_segments(rank);
  auto peers = bootstrap(store, options_of(rank, world_size), {segments[0].fd(), segments[1].fd()},
                         Deadline::after(60s));
  expect(static_cast<int>(peers.size()) == world_size, "one entry per rank");
  check_peers(peers, rank);
  check_connections(peers, rank);
}

std::size_t num_open_files() {
  std::vector<std::string> numbers;
  REQUIRE(list_names("/proc/self/fd", numbers) == 0);
  return numbers.size();
}

}  // namespace

TEST_CASE("Ranks that are threads meet") {
  const std::size_t open_before = num_open_files();
  for (int world_size : {1, 2, 3, 5, 8}) {
    InMemoryStore store;
    run_ranks(world_size, [&](int rank) { bootstrap_and_check(store, rank, world_size); });
  }
  REQUIRE(num_open_files() == open_before);
}

TEST_CASE("Ranks that are processes meet") {
  for (int world_size : {1, 2, 5}) {
    FolderStore store;
    const auto results = fork_ranks(world_size, [&](int rank) -> std::string {
      bootstrap_and_check(store, rank, world_size);
      return "";
    });
    for (const auto& result : results) {
      INFO(result.text);
      REQUIRE(result.ok());
    }
  }
}

TEST_CASE("The death of a peer shows on its connection and its process") {
  FolderStore store;
  const auto results = fork_ranks(3, [&](int rank) -> std::string {
    const auto peers = bootstrap(store, options_of(rank, 3), {}, soon());
    if (rank == 1) {
      // Only when everybody is through: what is tested is the death of a member.
      for (int other : {0, 2}) {
        const GroupPeer& peer = peers[static_cast<std::size_t>(other)];
        expect(receive_frame(peer.control.get(), FrameLimits{}, soon()).bytes == "met", "met");
      }
      ::kill(::getpid(), SIGKILL);
    }
    const GroupPeer& victim = peers[1];
    send_frame(victim.control.get(), "met", {}, soon());
    expect(wait_readable(victim.control.get(), 60s), "the connection ends");
    expect(is_closed(victim.control.get()), "with nothing left to read");
    expect(victim.process.has_ended(60s), "the process is seen to have ended");
    return "";
  });
  REQUIRE(results[1].signal == SIGKILL);
  for (int rank : {0, 2}) {
    INFO(results[static_cast<std::size_t>(rank)].text);
    REQUIRE(results[static_cast<std::size_t>(rank)].ok());
  }
}

TEST_CASE("Bootstraps of several groups at once do not mix") {
  InMemoryStore stores[3];
  run_ranks(9, [&](int thread) { bootstrap_and_check(stores[thread / 3], thread % 3, 3); });
}
