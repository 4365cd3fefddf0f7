#pragma once

// The library's one way to look up a host's addresses: with a deadline, since a name server that is
// gone can hold getaddrinfo for half a minute, and nothing ends that call.
//
// Thread rule: free functions; any thread. Blocking; they let interrupts through.
//
//   const HostLookup found = look_up_host("node-7", 29500, deadline);
//   if (found.addresses.empty()) throw NetworkError(found.problem);

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"

namespace libddp {

/// One address with its port, as connect and bind take it.
struct HostAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

struct HostLookup {
  /// The best first.
  std::vector<HostAddress> addresses;
  /// Why there are none.
  std::string problem;
  /// It was no numeric address.
  bool is_name = false;
};

HostLookup look_up_host(const std::string& host, std::uint16_t port, Deadline deadline);

/// The same, but a host that this process has looked up before is not looked up again, and a name
/// server that does not answer is asked once only and given 2 seconds. For what can do without.
HostLookup look_up_host_once(const std::string& host, Deadline deadline);

}  // namespace libddp
