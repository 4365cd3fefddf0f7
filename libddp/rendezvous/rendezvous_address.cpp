#include "libddp/rendezvous/rendezvous_address.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <climits>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/rendezvous/rendezvous_url.h"

namespace libddp {
namespace {

constexpr const char* kLaunchHint =
    "Hint: start the program with torchrun or 'libddp run', or set RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT";

/// A number that an argument or else a variable gives, and the name of where it came from.
struct Given {
  long value;
  std::string name;
};

Given argument_or_variable(const std::optional<int>& argument, const char* argument_name,
                           const char* variable, long minimum) {
  // Read in any case: garbage in the environment is worth an error even if an argument wins.
  const std::optional<long> from_environment = env_integer(variable, minimum, INT_MAX);
  if (argument) return {*argument, fmt::format("argument {}", argument_name)};
  if (from_environment) return {*from_environment, variable};
  throw ArgumentError(
      fmt::format("libddp: environment variable {} is not set. {}.", variable, kLaunchHint));
}

std::string required_host() {
  const std::optional<std::string> host = env_text("MASTER_ADDR");
  if (!host) {
    throw ArgumentError(
        fmt::format("libddp: environment variable MASTER_ADDR is not set. {}.", kLaunchHint));
  }
  const bool is_garbage = std::any_of(host->begin(), host->end(), [](unsigned char letter) {
    return std::isspace(letter) || !std::isprint(letter) || letter == '/';
  });
  if (is_garbage) {
    throw ArgumentError(fmt::format(
        "libddp: environment variable MASTER_ADDR='{}' is not a host name or address. Hint: give "
        "the name or IP address of rank 0's machine, without port or scheme.",
        *host));
  }
  return *host;
}

long argument_or_query(const std::string& url, const char* key, const std::optional<long>& given,
                       const std::optional<int>& argument) {
  if (!given && !argument) {
    RendezvousUrl::refuse(url, fmt::format("{} is given neither in it nor as argument", key));
  }
  if (given && argument && *argument != *given) {
    RendezvousUrl::refuse(
        url, fmt::format("it says {}={}, but the argument {}={}", key, *given, key, *argument));
  }
  return given ? *given : *argument;
}

}  // namespace

void check_place(const std::string& rank_name, long rank, const std::string& world_size_name,
                 long world_size) {
  if (world_size < 1) {
    throw ArgumentError(fmt::format("libddp: {}={} is not a number of ranks. Hint: 1 or more.",
                                    world_size_name, world_size));
  }
  if (rank < 0 || rank >= world_size) {
    throw ArgumentError(
        fmt::format("libddp: {}={} contradicts {}={}: ranks are 0 to {}. Hint: give each process "
                    "its own rank below the number of processes.",
                    rank_name, rank, world_size_name, world_size, world_size - 1));
  }
}

Address read_environment(const RendezvousOptions& options) {
  const Given rank = argument_or_variable(options.rank, "rank", "RANK", 0);
  const Given world_size = argument_or_variable(options.world_size, "world_size", "WORLD_SIZE", 1);
  check_place(rank.name, rank.value, world_size.name, world_size.value);
  Address address;
  address.rank = static_cast<int>(rank.value);
  address.world_size = static_cast<int>(world_size.value);
  address.is_agent_store = env_flag("TORCHELASTIC_USE_AGENT_STORE", false);
  const std::optional<long> port = env_integer("MASTER_PORT", 1, 65535);
  // One rank needs no store that others can reach.
  if (address.world_size == 1 && !address.is_agent_store) return address;
  address.kind = Address::Kind::Tcp;
  address.host = required_host();
  if (!port) {
    throw ArgumentError(
        fmt::format("libddp: environment variable MASTER_PORT is not set. {}.", kLaunchHint));
  }
  address.port = static_cast<std::uint16_t>(*port);
  if (address.is_agent_store) {
    const long attempt = env_integer("TORCHELASTIC_RESTART_COUNT", 0, INT_MAX).value_or(0);
    address.prefix = fmt::format("/worker/attempt_{}", attempt);
  }
  return address;
}

Address read_url(const std::string& url, const RendezvousOptions& options) {
  const RendezvousUrl parts = RendezvousUrl::parse(url);
  Address address;
  address.kind = parts.is_tcp ? Address::Kind::Tcp : Address::Kind::File;
  address.host = parts.host;
  address.port = parts.port;
  address.path = parts.path;
  const long rank = argument_or_query(url, "rank", parts.rank, options.rank);
  const long world_size =
      argument_or_query(url, "world_size", parts.world_size, options.world_size);
  check_place("rank", rank, "world_size", world_size);
  if (world_size > INT_MAX) RendezvousUrl::refuse(url, "world_size is too large");
  address.rank = static_cast<int>(rank);
  address.world_size = static_cast<int>(world_size);
  return address;
}

}  // namespace libddp
