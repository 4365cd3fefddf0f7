#include "libddp/group/inter_engine.h"

#include <fmt/format.h>

#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/random.h"
#include "libddp/group/c10d_failure.h"
#include "libddp/group/c10d_stage.h"
#include "libddp/transport/network_interface.h"

namespace libddp {
namespace {

/// A word of host 0: keys that an earlier group of this name left in the store are not read.
std::string agree_on_prefix(InterStage& links, InterPlace place) {
  std::string word = random_hex(8);
  MeshCall call;
  call.description.kind = OpKind::Broadcast;
  call.description.root = 0;
  call.description.count = word.size();
  std::snprintf(call.description.label, sizeof(call.description.label), "creation, inter");
  call.timeout = kInterJoin;
  links.begin(call);
  links.broadcast(reinterpret_cast<std::byte*>(word.data()), word.size(), 0);
  return fmt::format("inter/{}/{}", place.carrier, word);
}

void check_engine(const GroupIdentity& identity, const c10::intrusive_ptr<c10d::Backend>& engine,
                  InterPlace place) {
  const std::string what =
      !engine ? "gave nothing"
              : fmt::format("has rank {} of {}", engine->getRank(), engine->getSize());
  if (engine && engine->getRank() == place.host && engine->getSize() == place.num_hosts) return;
  throw ArgumentError(fmt::format(
      "{} inter: the engine {}, but carrier {} is on host {} of {}. Hint: an engine joins one rank "
      "per host, in the order of the hosts.",
      identity.where(), what, place.carrier, place.host, place.num_hosts));
}

}  // namespace

InterStageMaker stage_maker(const GroupIdentity& identity, const MeetingHints& hints,
                            Deadline deadline, std::chrono::milliseconds timeout) {
  if (!hints.inter) return nullptr;
  return [&identity, &hints, deadline, timeout](
             HostMesh& local, InterPlace place,
             std::unique_ptr<InterStage> links) -> std::unique_ptr<InterStage> {
    InterMeeting meeting;
    meeting.store = c10::make_intrusive<c10d::PrefixStore>(
        hints.inter_prefix + agree_on_prefix(*links, place), hints.inter_store);
    meeting.rank = place.host;
    meeting.world_size = place.num_hosts;
    meeting.address =
        choose_interface(hints.route_to, deadline, !hints.host_identity.empty()).address;
    meeting.timeout = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(timeout));
    c10::intrusive_ptr<c10d::Backend> engine;
    try {
      engine = hints.inter(meeting);
    } catch (...) {
      std::rethrow_exception(error_of_c10d(std::current_exception(), identity.where() + " inter",
                                           "joining from " + meeting.address));
    }
    check_engine(identity, engine, place);
    return std::make_unique<C10dStage>(local, identity, place, std::move(links), std::move(engine));
  };
}

}  // namespace libddp
