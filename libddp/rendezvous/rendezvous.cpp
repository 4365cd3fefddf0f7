#include "libddp/rendezvous/rendezvous.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/rendezvous/rendezvous_address.h"
#include "libddp/rendezvous/store_opening.h"
#include "libddp/rendezvous/store_visit.h"

namespace libddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) return;
  throw ArgumentError(fmt::format("libddp: timeout of {} ms. Hint: pass a time greater than zero.",
                                  timeout.count()));
}

Rendezvous with_own_store(const RendezvousOptions& options) {
  if (!options.rank || !options.world_size) {
    throw ArgumentError(fmt::format(
        "libddp: a store was passed without {}. Hint: with a store, pass rank and world_size too.",
        options.rank ? "world_size" : "rank"));
  }
  check_place("argument rank", *options.rank, "argument world_size", *options.world_size);
  return {.store = options.store, .rank = *options.rank, .world_size = *options.world_size};
}

StorePtr open_tcp(const Address& address, std::chrono::milliseconds timeout, StoreVisit& visit) {
  const Deadline deadline = Deadline::after(timeout);
  const auto open = [&](StoreRole role) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(timeout));
    return open_tcp_store(address.host, address.port, role, address.rank, left);
  };
  if (address.is_agent_store) return open(StoreRole::Client);
  if (address.rank == 0) {
    StorePtr store = open(StoreRole::Server);
    name_store(store, deadline);
    return store;
  }
  visit.place = fmt::format("{}:{}, rank {}", address.host, address.port, address.rank);
  return open_unvisited(
      visit, [&] { return open(StoreRole::Client); }, deadline);
}

StorePtr open_store(const Address& address, std::chrono::milliseconds timeout, StoreVisit& visit) {
  switch (address.kind) {
    case Address::Kind::Alone:
      return c10::make_intrusive<c10d::HashStore>();
    case Address::Kind::File:
      return open_file_store(address.path, address.world_size, timeout);
    case Address::Kind::Tcp:
      break;
  }
  StorePtr store = open_tcp(address, timeout, visit);
  store->setTimeout(timeout);
  if (address.prefix.empty()) return store;
  return c10::make_intrusive<c10d::PrefixStore>(address.prefix, std::move(store));
}

}  // namespace

Rendezvous rendezvous(const RendezvousOptions& options) {
  check_timeout(options.timeout);
  if (options.store) return with_own_store(options);
  const bool is_environment =
      options.init_method.empty() || options.init_method.rfind("env://", 0) == 0;
  const Address address =
      is_environment ? read_environment(options) : read_url(options.init_method, options);
  Rendezvous found{.store = {}, .rank = address.rank, .world_size = address.world_size};
  found.store = open_store(address, options.timeout, found.visit);
  return found;
}

}  // namespace libddp
