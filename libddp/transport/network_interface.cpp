#include "libddp/transport/network_interface.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"
#include "libddp/transport/host_lookup.h"

namespace libddp {
namespace {

std::string numeric_text(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const void* bytes =
      address->sa_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr)
          : static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  return ::inet_ntop(address->sa_family, bytes, text, sizeof(text)) != nullptr ? text : "";
}

bool is_link_local(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) items.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

[[noreturn]] void refuse_names(const std::vector<NetworkInterface>& known,
                               const std::string& variable, const std::string& value) {
  std::vector<std::string> names;
  for (const NetworkInterface& each : known) {
    names.push_back(fmt::format("{} ({})", each.name, each.address));
  }
  throw ArgumentError(fmt::format(
      "libddp: {}='{}' fits no network interface of this host that is up. There are: "
      "{}. Hint: names begin with an item of the list; =name is that one only, ^name "
      "all but it.",
      variable, value, names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
}

/// The own address that the kernel would send from; empty where there is no route. Sends nothing.
std::string source_address(const HostAddress& target) {
  const UniqueFd fd(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), target.get(), target.length) != 0) return "";
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0) return "";
  return numeric_text(reinterpret_cast<const sockaddr*>(&own));
}

/// The own addresses on the routes to `host`, best first.
std::vector<std::string> route_addresses(const std::string& host, Deadline deadline) {
  std::vector<std::string> addresses;
  if (host.empty()) return addresses;
  // A name that cannot be looked up decides nothing; the store was reached all the same.
  for (const HostAddress& target : look_up_host_once(host, deadline).addresses) {
    addresses.push_back(source_address(target));
  }
  return addresses;
}

struct DefaultRoute {
  unsigned long metric = 0;
  std::string name;
};

/// Interfaces of the kernel's default routes, best first; IPv4 before IPv6.
std::vector<std::string> default_route_names() {
  constexpr unsigned kUp = 0x1;
  constexpr unsigned kReject = 0x200;
  std::vector<DefaultRoute> v4;
  std::vector<DefaultRoute> v6;
  std::ifstream v4_file("/proc/net/route");
  std::string line;
  std::getline(v4_file, line);  // names of the columns
  while (std::getline(v4_file, line)) {
    std::string name, destination, gateway, mask;
    unsigned flags = 0, references = 0, use = 0;
    unsigned long metric = 0;
    std::istringstream fields(line);
    fields >> name >> destination >> gateway >> std::hex >> flags >> std::dec >> references >>
        use >> metric >> mask;
    const bool is_default = fields && destination == "00000000" && mask == "00000000";
    if (is_default && (flags & kUp) != 0) v4.push_back({metric, name});
  }
  std::ifstream v6_file("/proc/net/ipv6_route");
  while (std::getline(v6_file, line)) {
    std::string destination, length, source, source_length, gateway, references, use, name;
    unsigned long metric = 0;
    unsigned flags = 0;
    std::istringstream fields(line);
    fields >> destination >> length >> source >> source_length >> gateway >> std::hex >> metric >>
        references >> use >> flags >> name;
    const bool is_default = fields && destination == std::string(32, '0') && length == "00";
    if (is_default && (flags & kUp) != 0 && (flags & kReject) == 0) v6.push_back({metric, name});
  }
  std::vector<std::string> names;
  for (std::vector<DefaultRoute>* routes : {&v4, &v6}) {
    std::stable_sort(routes->begin(), routes->end(),
                     [](const auto& one, const auto& other) { return one.metric < other.metric; });
    for (const DefaultRoute& each : *routes) names.push_back(each.name);
  }
  return names;
}

/// Bridges and their ports that container and machine managers make: other hosts do not know their
/// addresses.
bool is_of_this_host_only(const NetworkInterface& each) {
  constexpr std::string_view kPrefixes[] = {"docker",  "virbr", "br-",    "veth",
                                            "lxcbr",   "lxdbr", "cni",    "podman",
                                            "vboxnet", "vmnet", "flannel"};
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                     [&](std::string_view prefix) { return each.name.starts_with(prefix); });
}

[[noreturn]] void refuse_all(const std::vector<NetworkInterface>& known) {
  std::vector<std::string> texts;
  for (const NetworkInterface& each : known) {
    const char* why = each.is_loopback     ? ", loopback"
                      : each.is_link_local ? ", link-local"
                      : !each.is_running   ? ", no carrier"
                                           : "";
    texts.push_back(fmt::format("{} ({}{})", each.name, each.address, why));
  }
  throw NetworkError(fmt::format(
      "libddp: this host has no address at which other hosts could reach it. Its interfaces: {}. "
      "Hint: bring up an interface with an address of the hosts' network, or name one with "
      "LIBDDP_SOCKET_IFNAME.",
      texts.empty() ? "none" : fmt::format("{}", fmt::join(texts, ", "))));
}

struct NameChoice {
  std::string variable;
  std::string value;
};

std::optional<NameChoice> chosen_names() {
  for (const char* variable :
       {"LIBDDP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    if (auto value = env_text(variable)) return NameChoice{variable, *std::move(value)};
  }
  return std::nullopt;
}

}  // namespace

bool is_interface_chosen() { return chosen_names().has_value(); }

std::vector<NetworkInterface> network_interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw NetworkError(errno_text("getifaddrs", errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<NetworkInterface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    found.push_back({.name = entry->ifa_name,
                     .address = numeric_text(entry->ifa_addr),
                     .is_ipv6 = family == AF_INET6,
                     .is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0,
                     .is_link_local = is_link_local(entry->ifa_addr),
                     .is_running = (entry->ifa_flags & IFF_RUNNING) != 0});
  }
  // IPv4 first: a host that has both is reached by either.
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.is_ipv6 < b.is_ipv6; });
  return found;
}

std::vector<NetworkInterface> matching_interfaces(const std::vector<NetworkInterface>& known,
                                                  const std::string& variable,
                                                  const std::string& value) {
  const bool excludes = value.starts_with('^');
  std::string list = excludes ? value.substr(1) : value;
  const bool is_exact = list.starts_with('=');
  if (is_exact) list = list.substr(1);
  const std::vector<std::string> items = split_list(list);
  std::vector<NetworkInterface> chosen;
  const auto take = [&](auto fits) {
    for (const NetworkInterface& each : known) {
      const bool is_taken = std::any_of(chosen.begin(), chosen.end(), [&](const auto& other) {
        return other.name == each.name && other.address == each.address;
      });
      if (!is_taken && fits(each)) chosen.push_back(each);
    }
  };
  if (excludes) {
    take([&](const NetworkInterface& each) {
      return std::none_of(items.begin(), items.end(), [&](const std::string& item) {
        return is_exact ? each.name == item : each.name.starts_with(item);
      });
    });
  } else {
    for (const std::string& item : items) {
      take([&](const NetworkInterface& each) { return each.name == item; });
      if (!is_exact) take([&](const auto& each) { return each.name.starts_with(item); });
    }
  }
  if (chosen.empty()) refuse_names(known, variable, value);
  return chosen;
}

NetworkInterface choose_among(const HostNetwork& network, bool allows_loopback) {
  std::vector<NetworkInterface> candidates;
  std::copy_if(network.interfaces.begin(), network.interfaces.end(), std::back_inserter(candidates),
               [](const NetworkInterface& each) { return !each.is_link_local; });
  const std::optional<NameChoice> names = chosen_names();
  if (names) candidates = matching_interfaces(candidates, names->variable, names->value);
  for (const std::string& address : network.route_addresses) {
    for (const NetworkInterface& each : candidates) {
      // A store on this host is reached through loopback, where nobody else can be.
      if (each.address == address && (!each.is_loopback || names)) return each;
    }
  }
  if (names) return candidates.front();
  std::erase_if(candidates, [&](const NetworkInterface& each) {
    return !each.is_running || (each.is_loopback && !allows_loopback);
  });
  for (const std::string& name : network.default_names) {
    for (const NetworkInterface& each : candidates) {
      if (each.name == name) return each;
    }
  }
  // The best last resort first.
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& one, const auto& other) {
    const auto badness = [](const NetworkInterface& each) {
      return each.is_loopback ? 2 : is_of_this_host_only(each) ? 1 : 0;
    };
    return badness(one) < badness(other);
  });
  if (candidates.empty()) refuse_all(network.interfaces);
  return candidates.front();
}

NetworkInterface choose_interface(const std::string& route_to, Deadline deadline,
                                  bool allows_loopback) {
  return choose_among(
      {network_interfaces(), route_addresses(route_to, deadline), default_route_names()},
      allows_loopback);
}

}  // namespace libddp
