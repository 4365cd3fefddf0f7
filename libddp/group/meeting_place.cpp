#include "libddp/group/meeting_place.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/build_info.h"
#include "libddp/base/deadline.h"
#include "libddp/collectives/host_mesh.h"
#include "libddp/collectives/mesh_assembly.h"
#include "libddp/group/host_backend.h"
#include "libddp/group/inter_engine.h"
#include "libddp/transport/link_settings.h"
#include "libddp/transport/meeting.h"
#include "libddp/transport/run_key.h"

namespace libddp {
namespace {

std::vector<GroupPeer> meet_all(KeyValueStore& store, const GroupIdentity& identity,
                                const MeetingHints& hints, const SharedSegment& page,
                                const Arena& arena, const LinkSettings& link, Deadline deadline) {
  const MeetingOptions options{
      .rank = identity.rank,
      .world_size = identity.world_size,
      .group_name = identity.name,
      .agreement = fmt::format("libddp {}, {}, {}", version(), HostMesh::layout(), link.to_text()),
      .note = HostMesh::own_cpu_mask(),
      .route_to = hints.route_to,
      .sockets_per_link = link.sockets_per_link,
      .key = given_run_key(),
      .require_key = RequireKey::is_set(),
      .host_identity = hints.host_identity,
  };
  std::vector<GroupPeer> peers = meet(store, options, descriptors_of(page, arena), deadline);
  // All peers have read them; a later group of the same name on this store starts clean.
  store.remove(fmt::format("card/{}", identity.rank));
  store.remove(fmt::format("claim/{}", identity.rank));
  store.remove(fmt::format("link/{}", identity.rank));
  if (options.key) store.remove(fmt::format("hail/{}", identity.rank));
  return peers;
}

}  // namespace

std::unique_ptr<Backend> meet_ranks(KeyValueStore& store, const GroupIdentity& identity,
                                    const MeetingHints& hints, std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  const LinkSettings link = LinkSettings::from_environment();
  SharedSegment page = HostMesh::create_page(identity.name, identity.world_size);
  std::shared_ptr<Arena> arena =
      Arena::create(identity.name, Arena::default_reserve_bytes(identity.world_size));
  std::vector<GroupPeer> peers = meet_all(store, identity, hints, page, *arena, link, deadline);

  std::unique_ptr<Mesh> mesh =
      assemble_mesh({.rank = identity.rank,
                     .group_name = identity.name,
                     .arena = arena,
                     .page = std::move(page),
                     .link = link,
                     .make_stage = stage_maker(identity, hints, deadline, timeout)},
                    peers);
  auto backend =
      std::make_unique<HostBackend>(identity, std::move(arena), std::move(mesh), std::move(peers));
  // Nobody returns before everyone has met: the store may end with rank 0.
  backend->meet_all(std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(timeout)) +
                    std::chrono::milliseconds(1));
  return backend;
}

}  // namespace libddp
