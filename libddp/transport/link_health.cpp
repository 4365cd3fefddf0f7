#include "libddp/transport/link_health.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <utility>

#include "libddp/transport/tcp_socket.h"

namespace libddp {
namespace {

using NameOf = int (*)(int, sockaddr*, socklen_t*);

std::string end_text(int socket, NameOf name_of) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  auto* address = reinterpret_cast<sockaddr*>(&name);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (name_of(socket, address, &length) != 0 ||
      ::getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return TcpEndpoint{host.data(), static_cast<std::uint16_t>(std::stoi(port.data()))}.to_string();
}

/// Nanoseconds since the last acknowledgement, if bytes or probes wait for one.
std::optional<std::int64_t> owed_for(int socket) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  if (info.tcpi_state != TCP_ESTABLISHED) return std::nullopt;  // over, or ending in order
  if (info.tcpi_retransmits == 0 && info.tcpi_probes == 0) return std::nullopt;
  return static_cast<std::int64_t>(info.tcpi_last_ack_recv) * 1'000'000;
}

}  // namespace

std::string connection_text(int socket) {
  return fmt::format("{} to {}", end_text(socket, &::getsockname),
                     end_text(socket, &::getpeername));
}

void LinkHealth::watch(int socket, std::string peer, int rank, pid_t pid) {
  Link link;
  link.socket = socket;
  link.peer = std::move(peer);
  link.rank = rank;
  link.pid = pid;
  links_.push_back(std::move(link));
}

std::optional<LinkHealth::Dead> LinkHealth::look(std::int64_t now_ns) {
  for (Link& link : links_) {
    const auto silent_ns = owed_for(link.socket);
    if (!silent_ns) {
      link.owed_since_ns = 0;
      continue;
    }
    // An idle connection has had no acknowledgement for long either: what counts is the time since
    // something was owed first, or since the last one after that.
    const bool is_new = link.owed_since_ns == 0 || *silent_ns < now_ns - link.owed_since_ns;
    if (is_new) link.owed_since_ns = now_ns;
    const std::int64_t owed_ns = now_ns - link.owed_since_ns;
    if (owed_ns < kPatienceNs) continue;
    return Dead{
        link.rank, link.pid,
        fmt::format("the network no longer carries a connection to {}: nothing that was sent from "
                    "{} has been acknowledged for {:.1f} s. Hint: a firewall or NAT between the "
                    "hosts may have forgotten the connection; let it keep idle connections, or let "
                    "all ports through between the hosts",
                    link.peer, connection_text(link.socket), static_cast<double>(owed_ns) * 1e-9)};
  }
  return std::nullopt;
}

}  // namespace libddp
