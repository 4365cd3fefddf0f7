#include "libddp/transport/host_lookup.h"

#include <fmt/format.h>
#include <netdb.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "libddp/base/blocking_calls.h"

namespace libddp {
namespace {

constexpr std::chrono::milliseconds kOncePatience{2000};
/// Any; sockets that only ask the kernel for a route need one.
constexpr std::uint16_t kDiscardPort = 9;

/// What was found of each host, also that nothing was.
struct KnownHosts {
  std::mutex mutex;
  std::map<std::string, HostLookup> lookups;
};

KnownHosts& known_hosts() {
  static KnownHosts known;
  return known;
}

void remember(const std::string& host, const HostLookup& lookup) {
  KnownHosts& known = known_hosts();
  const std::lock_guard lock(known.mutex);
  known.lookups.insert_or_assign(host, lookup);
}

/// Waits as long as the resolver does.
HostLookup ask_resolver(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  HostLookup lookup;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    lookup.problem = fmt::format("cannot resolve the name: {}", ::gai_strerror(error));
    return lookup;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    HostAddress address;
    std::memcpy(&address.storage, each->ai_addr, each->ai_addrlen);
    address.length = each->ai_addrlen;
    lookup.addresses.push_back(address);
  }
  if (lookup.addresses.empty()) lookup.problem = "it has no address";
  return lookup;
}

}  // namespace

HostLookup look_up_host(const std::string& host, std::uint16_t port, Deadline deadline) {
  HostLookup numeric = ask_resolver(host, port, AI_NUMERICHOST);
  if (!numeric.addresses.empty()) return numeric;
  const auto start = Deadline::Clock::now();
  BlockingCalls calls("libddp-lookup");
  std::optional<HostLookup> lookup =
      calls.run<HostLookup>([host, port] { return ask_resolver(host, port, 0); }, deadline);
  if (!lookup) {
    const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
    lookup.emplace();
    lookup->problem = fmt::format(
        "cannot resolve the name: no name server has answered for {:.1f} s", waited.count());
  }
  lookup->is_name = true;
  if (!lookup->addresses.empty()) remember(host, *lookup);
  return *std::move(lookup);
}

HostLookup look_up_host_once(const std::string& host, Deadline deadline) {
  {
    KnownHosts& known = known_hosts();
    const std::lock_guard lock(known.mutex);
    const auto found = known.lookups.find(host);
    if (found != known.lookups.end()) return found->second;
  }
  const auto patience =
      std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(kOncePatience));
  HostLookup lookup = look_up_host(host, kDiscardPort, Deadline::after(patience));
  remember(host, lookup);
  return lookup;
}

}  // namespace libddp
