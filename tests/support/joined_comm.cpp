#include "tests/support/joined_comm.h"

#include <unistd.h>

#include <chrono>
#include <utility>

namespace libddp::test {
namespace {

constexpr std::size_t kArenaBytes = 512u << 20;
constexpr std::chrono::seconds kBootstrapTimeout{60};

}  // namespace

JoinedComm join_comm(KeyValueStore& store, int rank, int world_size, const std::string& cpu_mask) {
  JoinedComm joined;
  joined.arena = Arena::create("joined", kArenaBytes);
  SharedSegment page = ShmComm::create_page("joined", world_size);
  joined.peers =
      bootstrap(store,
                {.rank = rank,
                 .world_size = world_size,
                 .group_name = "joined",
                 .agreement = ShmComm::layout(),
                 .note = cpu_mask},
                {page.fd(), joined.arena->segment().fd()}, Deadline::after(kBootstrapTimeout));
  ShmCommOptions options{
      .rank = rank, .world_size = world_size, .group_name = "joined", .arena = joined.arena};
  for (GroupPeer& peer : joined.peers) {
    ShmMember& member = options.members.emplace_back();
    member.pid = peer.rank == rank ? ::getpid() : peer.pid;
    member.host = peer.host;
    member.cpu_mask = peer.rank == rank ? cpu_mask : peer.note;
    if (peer.rank == rank) {
      member.page = std::move(page);
    } else {
      member.page = SharedSegment::map(std::move(peer.descriptors.at(0)));
      member.arena = SharedSegment::map(std::move(peer.descriptors.at(1)));
    }
  }
  joined.comm = std::make_unique<ShmComm>(std::move(options));
  return joined;
}

}  // namespace libddp::test
