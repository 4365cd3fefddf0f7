#include "libddp/host/member_watch.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/process.h"

namespace libddp {

MemberWatch::MemberWatch(const ReconfigurePlan& plan) : plan_(plan) {
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    const MemberHandle& member = plan.members()[static_cast<std::size_t>(rank)];
    const bool is_seen = !member.pid_place.empty() && member.pid_place == plan.own().pid_place;
    if (rank == plan.rank() || !is_seen) continue;
    ProcessHandle process(member.pid);
    if (process.has_ended()) refuse(rank);
    if (!process) continue;
    // A number that another process has since; read behind the opening, so that it is of this one.
    if (!member.begun.empty() && process_begin(member.pid) != member.begun) refuse(rank);
    watched_.push_back({rank, std::move(process)});
  }
  throw_if_ended();
}

void MemberWatch::throw_if_ended() const {
  for (const Watched& each : watched_) {
    if (each.process.has_ended()) refuse(each.rank);
  }
}

void MemberWatch::refuse(int rank) const {
  const MemberHandle& gone = plan_.members()[static_cast<std::size_t>(rank)];
  throw PeerError(
      fmt::format("libddp {}: the process that is to be rank {} ({}) has ended. Hint: reconfigure "
                  "with a fresh uuid and the handles of processes that live.",
                  plan_.name(), rank, gone.who()),
      rank, gone.pid);
}

}  // namespace libddp
