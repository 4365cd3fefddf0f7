#include "libddp/transport/network_interface.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"

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
std::string source_address(const addrinfo& target) {
  const UniqueFd fd(::socket(target.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), target.ai_addr, target.ai_addrlen) != 0) return "";
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0) return "";
  return numeric_text(reinterpret_cast<const sockaddr*>(&own));
}

/// The addresses on the routes to `host`, best first.
std::vector<std::string> route_addresses(const std::string& host) {
  std::vector<std::string> addresses;
  if (host.empty()) return addresses;
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  // A name that cannot be looked up decides nothing; the store was reached all the same.
  if (::getaddrinfo(host.c_str(), "9", &hints, &list) != 0) return addresses;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  for (const addrinfo* target = list; target != nullptr; target = target->ai_next) {
    addresses.push_back(source_address(*target));
  }
  return addresses;
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

std::vector<NetworkInterface> network_interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw NetworkError(errno_text("getifaddrs", errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<NetworkInterface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if ((family != AF_INET && family != AF_INET6) || is_link_local(entry->ifa_addr)) continue;
    found.push_back({entry->ifa_name, numeric_text(entry->ifa_addr), family == AF_INET6,
                     (entry->ifa_flags & IFF_LOOPBACK) != 0});
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

NetworkInterface choose_interface(const std::string& route_to) {
  std::vector<NetworkInterface> candidates = network_interfaces();
  const std::optional<NameChoice> names = chosen_names();
  if (names) candidates = matching_interfaces(candidates, names->variable, names->value);
  for (const std::string& address : route_addresses(route_to)) {
    for (const NetworkInterface& each : candidates) {
      // A store on this host is reached through loopback, where nobody else can be.
      if (each.address == address && (!each.is_loopback || names)) return each;
    }
  }
  if (names) return candidates.front();
  for (const NetworkInterface& each : candidates) {
    if (!each.is_loopback) return each;
  }
  if (!candidates.empty()) return candidates.front();
  throw NetworkError("this host has no network interface that is up");
}

}  // namespace libddp
