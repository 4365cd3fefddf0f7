#include "libddp/group/rendezvous.h"

#include <fmt/format.h>

#include <sstream>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "libddp/base/error.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/group/rendezvous_address.h"
#include "libddp/group/store_opening.h"

namespace libddp {
namespace {

/// Names that mean our host backend, alone or for the device cpu.
bool is_host_name(const std::string& name) {
  return name == "auto" || name == "libddp" || name == "gloo" || name == "shm" || name == "host";
}

[[noreturn]] void refuse_backend(const std::string& backend, const std::string& why) {
  throw ArgumentError(
      fmt::format("libddp: backend '{}': {}. Hint: use 'auto', 'libddp' or 'gloo' for CPU tensors.",
                  backend, why));
}

/// One "name" or "device:name" of a list. Returns whether it serves CPU tensors.
bool check_backend_part(const std::string& backend, const std::string& part) {
  const std::size_t colon = part.find(':');
  const std::string device = colon == std::string::npos ? "" : part.substr(0, colon);
  const std::string name = colon == std::string::npos ? part : part.substr(colon + 1);
  if (is_host_name(name) && (device.empty() || device == "cpu")) return true;
  if (name == "nccl" && device == "cuda") return false;  // without effect until CUDA is used
  if (name == "nccl")
    refuse_backend(backend, "nccl moves CUDA tensors, and this build has no CUDA");
  refuse_backend(backend, fmt::format("'{}' is not known", part));
}

void check_backend(const std::string& backend) {
  bool serves_cpu = false;
  std::istringstream list(backend);
  for (std::string part; std::getline(list, part, ',');) {
    serves_cpu = check_backend_part(backend, part) || serves_cpu;
  }
  if (!serves_cpu) refuse_backend(backend, "it names nothing for CPU tensors");
}

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) return;
  throw ArgumentError(fmt::format("libddp: timeout of {} ms. Hint: pass a time greater than zero.",
                                  timeout.count()));
}

Rendezvous with_own_store(const InitOptions& options) {
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

Rendezvous rendezvous(const InitOptions& options) {
  check_timeout(options.timeout);
  if (options.store) return with_own_store(options);
  const bool is_environment =
      options.init_method.empty() || options.init_method.rfind("env://", 0) == 0;
  const Address address =
      is_environment ? read_environment(options) : read_url(options.init_method, options);
  return {open_store(address, options.timeout), address.rank, address.world_size};
}

Group init_process_group(const InitOptions& options) {
  check_backend(options.backend);
  const RequireKey require_key(options.require_key);
  Rendezvous found = rendezvous(options);
  return ProcessGroup::create(std::move(found.store), {.rank = found.rank,
                                                       .world_size = found.world_size,
                                                       .name = options.group_name,
                                                       .timeout = options.timeout,
                                                       .global_ranks = {},
                                                       .inter = options.inter,
                                                       .links = options.links});
}

}  // namespace libddp
