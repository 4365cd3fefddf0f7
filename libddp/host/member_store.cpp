#include "libddp/host/member_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/host/member_handle.h"
#include "libddp/rendezvous/store_opening.h"
#include "libddp/transport/network_interface.h"

namespace libddp {
namespace {

/// As it was written: what a name means here says nothing about where the others are.
bool is_loopback_text(const std::string& host) {
  return host == "localhost" || host == "::1" ||
         (host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string::npos);
}

std::string listening_address(const std::string& route_to, Deadline deadline) {
  const bool is_this_host = is_loopback_text(route_to);
  if (is_this_host && !is_interface_chosen()) return route_to == "::1" ? route_to : "127.0.0.1";
  try {
    return choose_interface(route_to, deadline, false).address;
  } catch (const NetworkError&) {
    // Nothing but loopback: then the others are here.
    return choose_interface(route_to, deadline, true).address;
  }
}

}  // namespace

MemberStore::MemberStore(const std::string& route_to, const std::string& host_identity,
                         std::chrono::milliseconds timeout) {
  const std::string address = listening_address(route_to, Deadline::after(timeout));
  try {
    server_ = open_tcp_store(address, 0, StoreRole::Server, 0, timeout);
  } catch (const Error& error) {
    throw NetworkError(fmt::format(
        "libddp enable_reconfigure: this process cannot listen at {} for those that it is to meet: "
        "{}. Hint: LIBDDP_SOCKET_IFNAME says which interface to take.",
        address, error.what()));
  }
  const auto& server = dynamic_cast<const c10d::TCPStore&>(*server_);
  handle_ = MemberHandle::own(address, server.getPort(), host_identity).encode();
}

MemberStore::~MemberStore() {
  // In a forked child its threads do not exist.
  if (!made_.is_current()) static_cast<void>(server_.release());
}

}  // namespace libddp
