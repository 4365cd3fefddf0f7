#include "libddp/group/meeting_place.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/collectives/host_mesh.h"
#include "libddp/group/host_backend.h"
#include "libddp/transport/meeting.h"

namespace libddp {
namespace {

/// What each rank passes to the others, in this order.
enum Descriptor : std::size_t { kPage, kArena, kNumDescriptors };

std::vector<LocalPeer> meet_all(KeyValueStore& store, const GroupIdentity& identity,
                                const SharedSegment& page, const Arena& arena, Deadline deadline) {
  const MeetingOptions options{
      .rank = identity.rank,
      .world_size = identity.world_size,
      .group_name = identity.name,
      .agreement = HostMesh::layout(),
      .note = HostMesh::own_cpu_mask(),
  };
  std::vector<LocalPeer> peers = meet(store, options, {page.fd(), arena.segment().fd()}, deadline);
  // All peers have read them; a later group of the same name on this store starts clean.
  store.remove(fmt::format("card/{}", identity.rank));
  store.remove(fmt::format("claim/{}", identity.rank));
  return peers;
}

std::vector<MeshMember> map_members(std::vector<LocalPeer>& peers, const GroupIdentity& identity,
                                    SharedSegment page) {
  std::vector<MeshMember> members;
  for (LocalPeer& peer : peers) {
    MeshMember member;
    member.pid = peer.pid;
    member.host = peer.host;
    member.cpu_mask = peer.note;
    if (peer.rank == identity.rank) {
      member.page = std::move(page);
    } else {
      if (peer.descriptors.size() != kNumDescriptors) {
        throw PeerError(fmt::format("{}: rank {} passed {} descriptors instead of {}. Hint: all "
                                    "ranks must run one version of libddp.",
                                    identity.where(), peer.rank, peer.descriptors.size(),
                                    static_cast<std::size_t>(kNumDescriptors)),
                        peer.rank, peer.pid);
      }
      member.page = SharedSegment::map(std::move(peer.descriptors[kPage]));
      member.arena = SharedSegment::map(std::move(peer.descriptors[kArena]));
    }
    members.push_back(std::move(member));
  }
  return members;
}

}  // namespace

std::unique_ptr<Backend> meet_on_host(KeyValueStore& store, const GroupIdentity& identity,
                                      std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  SharedSegment page = HostMesh::create_page(identity.name, identity.world_size);
  std::shared_ptr<Arena> arena =
      Arena::create(identity.name, Arena::default_reserve_bytes(identity.world_size));
  std::vector<LocalPeer> peers = meet_all(store, identity, page, *arena, deadline);

  HostMeshOptions options;
  options.rank = identity.rank;
  options.world_size = identity.world_size;
  options.group_name = identity.name;
  options.arena = arena;
  options.members = map_members(peers, identity, std::move(page));
  auto mesh = std::make_unique<HostMesh>(std::move(options));
  auto backend =
      std::make_unique<HostBackend>(identity, std::move(arena), std::move(mesh), std::move(peers));
  // Nobody returns before everyone has met: the store may end with rank 0.
  backend->meet_all(std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(timeout)) +
                    std::chrono::milliseconds(1));
  return backend;
}

}  // namespace libddp
