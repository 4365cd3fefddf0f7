#include "libddp/collectives/link_failure.h"

#include <fmt/format.h>

#include "libddp/base/system_error.h"

namespace libddp {

GroupFailure lost_connection(const LinkEnd& end, int socket, int error) {
  if (error == 0) {
    return {GroupFailure::Kind::Peer,
            fmt::format("lost a connection to {}: it was closed there. Hint: look at that "
                        "process's own output",
                        end.name),
            end.rank, end.pid};
  }
  return {GroupFailure::Kind::Network,
          fmt::format("the network lost a connection to {} ({}): {}; that process has not been "
                      "seen to end. Hint: a firewall or NAT between the hosts may have forgotten "
                      "the connection; let it keep idle connections, or let all ports through "
                      "between the hosts",
                      end.name, connection_text(socket), errno_text("connection", error)),
          end.rank, end.pid};
}

std::optional<GroupFailure> network_failure(const std::optional<LinkHealth::Dead>& dead) {
  if (!dead) return std::nullopt;
  return GroupFailure{GroupFailure::Kind::Network, dead->text, dead->rank, dead->pid};
}

}  // namespace libddp
