#pragma once

// Which of this host's addresses the other hosts use.
//
// A variable decides if one is set: LIBDDP_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, else
// GLOO_SOCKET_IFNAME. Its value is a list of names: "eth,ens" takes names that begin so (one that
// is exactly so comes first), "=eth0" takes that name only, "^docker,lo" takes all but those.
// Otherwise it is the interface on the route to the host of the store; where that is loopback (the
// store is here, or /etc/hosts says so) that of the default route, else the first with a carrier
// that is no bridge of this host's containers. Loopback is published to nobody. Thread rule: free
// functions; any thread.
//
//   NetworkInterface mine = choose_interface("10.0.0.1", deadline, false);
//   mine.name;      // "eth0"
//   mine.address;   // "10.0.0.7"

#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"

namespace libddp {

/// One address of an interface that is up.
struct NetworkInterface {
  std::string name;
  std::string address;
  bool is_ipv6 = false;
  bool is_loopback = false;
  /// IPv6, valid on one cable only.
  bool is_link_local = false;
  /// It has a carrier.
  bool is_running = true;
};

std::vector<NetworkInterface> network_interfaces();

/// One of the variables decides.
bool is_interface_chosen();

/// The entries of `known` that `value` names, in the order of preference. Throws ArgumentError,
/// which lists what exists, if there are none; `variable` is for its text.
std::vector<NetworkInterface> matching_interfaces(const std::vector<NetworkInterface>& known,
                                                  const std::string& variable,
                                                  const std::string& value);

/// What decides about the interface, as far as the kernel knows it.
struct HostNetwork {
  std::vector<NetworkInterface> interfaces;
  /// Own addresses on the routes to the store, and names of the interfaces of the default routes,
  /// best first.
  std::vector<std::string> route_addresses;
  std::vector<std::string> default_names;
};

/// Throws ArgumentError for a variable that fits nothing, NetworkError that lists the interfaces if
/// none has an address for other hosts. `allows_loopback`: the other hosts are this machine too.
NetworkInterface choose_among(const HostNetwork& network, bool allows_loopback);

/// The same of this host. `route_to`: host of the store as a name or address; may be empty.
NetworkInterface choose_interface(const std::string& route_to, Deadline deadline,
                                  bool allows_loopback);

}  // namespace libddp
