#pragma once

// Which of this host's addresses the other hosts use.
//
// A variable decides if one is set: LIBDDP_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, else
// GLOO_SOCKET_IFNAME. Its value is a list of names: "eth,ens" takes names that begin so (one that
// is exactly so comes first), "=eth0" takes that name only, "^docker,lo" takes all but those.
// Otherwise it is the interface on the route to the host of the store, else the first that is no
// loopback. Thread rule: free functions; any thread.
//
//   NetworkInterface mine = choose_interface("10.0.0.1");
//   mine.name;      // "eth0"
//   mine.address;   // "10.0.0.7"

#include <optional>
#include <string>
#include <vector>

namespace libddp {

/// One address of an interface that is up. Link-local addresses are left out.
struct NetworkInterface {
  std::string name;
  std::string address;
  bool is_ipv6 = false;
  bool is_loopback = false;
};

std::vector<NetworkInterface> network_interfaces();

/// The entries of `known` that `value` names, in the order of preference. Throws ArgumentError,
/// which lists what exists, if there are none; `variable` is for its text.
std::vector<NetworkInterface> matching_interfaces(const std::vector<NetworkInterface>& known,
                                                  const std::string& variable,
                                                  const std::string& value);

/// `route_to`: host of the store as a name or address; may be empty.
/// Throws ArgumentError for a variable that fits nothing, NetworkError if there is no network.
NetworkInterface choose_interface(const std::string& route_to);

}  // namespace libddp
