#include "libddp/group/meeting_place.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/build_info.h"
#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/bootstrap/meeting.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/collectives/host_mesh.h"
#include "libddp/collectives/mesh_assembly.h"
#include "libddp/group/host_backend.h"
#include "libddp/group/inter_engine.h"
#include "libddp/group/operand.h"
#include "libddp/transport/link_settings.h"
#include "libddp/watchdog/pulse.h"

namespace libddp {
namespace {

/// What a rank brings to the meeting itself.
struct OwnParts {
  LinkSettings link;
  SharedSegment page;
  std::shared_ptr<Arena> arena;
};

LinkSettings link_settings(const LinkOptions& chosen) {
  std::optional<Dtype> dtype;
  if (chosen.wire_dtype) {
    dtype = wire_dtype(*chosen.wire_dtype);
    if (!dtype || c10::isComplexType(*chosen.wire_dtype)) {
      throw ArgumentError(fmt::format(
          "libddp: wire_dtype={} is neither float32 nor bfloat16. Hint: bfloat16 halves the bytes "
          "of float32 sums between hosts.",
          c10::toString(*chosen.wire_dtype)));
    }
  }
  return LinkSettings::chosen(chosen.sockets_per_link, dtype);
}

MeetingOptions meeting_options(const GroupIdentity& identity, const MeetingHints& hints) {
  MeetingOptions options;
  options.rank = identity.rank;
  options.world_size = identity.world_size;
  options.group_name = identity.name;
  options.note = HostMesh::own_cpu_mask();
  options.route_to = hints.route_to;
  options.host_identity = hints.host_identity;
  options.look = hints.look;
  return options;
}

/// Reads whatever the user has set, so that what cannot be read is known before the meeting.
OwnParts prepare(const GroupIdentity& identity, const MeetingHints& hints,
                 MeetingOptions& options) {
  options.key = given_run_key();
  options.require_key = hints.require_key || is_run_key_required();
  heartbeat_timeout();
  OwnParts own;
  own.link = link_settings(hints.links);
  options.sockets_per_link = own.link.sockets_per_link;
  options.agreement = fmt::format("libddp {}, {}, {} inter={}", version(), HostMesh::layout(),
                                  own.link.to_text(), hints.inter ? "an engine" : "none");
  own.page = HostMesh::create_page(identity.name, identity.world_size);
  own.arena = Arena::create(identity.name, Arena::default_reserve_bytes(identity.world_size));
  return own;
}

std::vector<GroupPeer> meet_all(KeyValueStore& store, const MeetingOptions& options,
                                const OwnParts& own, Deadline deadline) {
  std::vector<GroupPeer> peers =
      meet(store, options, descriptors_of(own.page, *own.arena), deadline);
  // All peers have read them; a later group of the same name on this store starts clean.
  store.remove(fmt::format("card/{}", options.rank));
  store.remove(fmt::format("claim/{}", options.rank));
  store.remove(fmt::format("link/{}", options.rank));
  if (options.key) store.remove(fmt::format("hail/{}", options.rank));
  return peers;
}

}  // namespace

std::unique_ptr<Backend> meet_ranks(KeyValueStore& store, const GroupIdentity& identity,
                                    const MeetingHints& hints, std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  MeetingOptions options = meeting_options(identity, hints);
  OwnParts own;
  try {
    own = prepare(identity, hints, options);
  } catch (const Error& error) {
    refuse_meeting(store, options, error.what());
    throw;
  }
  std::vector<GroupPeer> peers = meet_all(store, options, own, deadline);

  const std::shared_ptr<Arena> arena = own.arena;
  std::unique_ptr<Mesh> mesh =
      assemble_mesh({.rank = identity.rank,
                     .group_name = identity.name,
                     .arena = arena,
                     .page = std::move(own.page),
                     .link = own.link,
                     .make_stage = stage_maker(identity, hints, deadline, timeout)},
                    peers);
  auto backend = std::make_unique<HostBackend>(identity, arena, std::move(mesh), std::move(peers));
  // Nobody returns before everyone has met: the store may end with rank 0.
  backend->meet_all(std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(timeout)) +
                    std::chrono::milliseconds(1));
  return backend;
}

}  // namespace libddp
