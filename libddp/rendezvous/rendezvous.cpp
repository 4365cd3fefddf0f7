#include "libddp/rendezvous/rendezvous.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "libddp/base/error.h"
#include "libddp/rendezvous/rendezvous_address.h"
#include "libddp/rendezvous/store_opening.h"

namespace libddp {
namespace {

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
  return {options.store, *options.rank, *options.world_size};
}

c10::intrusive_ptr<c10d::Store> open_store(const Address& address,
                                           std::chrono::milliseconds timeout) {
  switch (address.kind) {
    case Address::Kind::Alone:
      return c10::make_intrusive<c10d::HashStore>();
    case Address::Kind::File:
      return open_file_store(address.path, address.world_size, timeout);
    case Address::Kind::Tcp:
      break;
  }
  const bool is_server = address.rank == 0 && !address.is_agent_store;
  auto store =
      open_tcp_store(address.host, address.port, is_server ? StoreRole::Server : StoreRole::Client,
                     address.rank, timeout);
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
  return {open_store(address, options.timeout), address.rank, address.world_size};
}

}  // namespace libddp
