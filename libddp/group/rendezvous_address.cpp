#include "libddp/group/rendezvous_address.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <climits>
#include <map>

#include "libddp/base/env.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

constexpr const char* kLaunchHint =
    "Hint: start the program with torchrun or 'libddp run', or set RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT";

[[noreturn]] void refuse_url(const std::string& url, const std::string& problem) {
  throw ArgumentError(
      fmt::format("libddp: init_method '{}': {}. Hint: tcp://host:port?rank=0&world_size=2, "
                  "file:///shared/path?rank=0&world_size=2, or env://.",
                  url, problem));
}

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

std::map<std::string, std::string> parse_query(const std::string& url, const std::string& query) {
  std::map<std::string, std::string> values;
  for (std::size_t begin = 0; begin < query.size();) {
    const std::size_t end = std::min(query.find('&', begin), query.size());
    const std::string part = query.substr(begin, end - begin);
    const std::size_t equal = part.find('=');
    const std::string key = part.substr(0, equal);
    if (equal == std::string::npos || (key != "rank" && key != "world_size")) {
      refuse_url(url, fmt::format("'{}' is neither rank=N nor world_size=N", part));
    }
    if (!values.emplace(key, part.substr(equal + 1)).second) {
      refuse_url(url, fmt::format("{} is given twice", key));
    }
    begin = end + 1;
  }
  return values;
}

std::optional<long> parse_number(const std::string& text) {
  long number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return number;
}

long argument_or_query(const std::string& url, const std::map<std::string, std::string>& query,
                       const std::string& key, const std::optional<int>& argument) {
  const auto entry = query.find(key);
  if (entry == query.end()) {
    if (!argument) refuse_url(url, fmt::format("{} is given neither in it nor as argument", key));
    return *argument;
  }
  const std::optional<long> number = parse_number(entry->second);
  if (!number) refuse_url(url, fmt::format("{}='{}' is not a number", key, entry->second));
  if (argument && *argument != *number) {
    refuse_url(url,
               fmt::format("it says {}={}, but the argument {}={}", key, *number, key, *argument));
  }
  return *number;
}

void read_host_and_port(const std::string& url, const std::string& place, Address& address) {
  const std::size_t colon = place.rfind(':');
  if (colon == std::string::npos) refuse_url(url, "it has no port");
  address.host = place.substr(0, colon);
  if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);  // [::1]
  }
  if (address.host.empty()) refuse_url(url, "it has no host");
  const std::string text = place.substr(colon + 1);
  const std::optional<long> port = parse_number(text);
  if (!port || *port < 1 || *port > 65535) {
    refuse_url(url, fmt::format("port '{}' is not a number from 1 to 65535", text));
  }
  address.port = static_cast<std::uint16_t>(*port);
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

Address read_environment(const InitOptions& options) {
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

Address read_url(const std::string& url, const InitOptions& options) {
  const std::size_t scheme_end = url.find("://");
  const std::string scheme = url.substr(0, scheme_end);
  if (scheme_end == std::string::npos || (scheme != "tcp" && scheme != "file")) {
    refuse_url(url, "it is none of env://, tcp:// and file://");
  }
  const std::string rest = url.substr(scheme_end + 3);
  const std::size_t question = std::min(rest.find('?'), rest.size());
  const std::string place = rest.substr(0, question);
  const auto query =
      parse_query(url, question < rest.size() ? rest.substr(question + 1) : std::string());
  Address address;
  if (scheme == "tcp") {
    address.kind = Address::Kind::Tcp;
    read_host_and_port(url, place, address);
  } else {
    address.kind = Address::Kind::File;
    if (place.size() < 2 || place.front() != '/') refuse_url(url, "it has no absolute path");
    address.path = place;
  }
  const long rank = argument_or_query(url, query, "rank", options.rank);
  const long world_size = argument_or_query(url, query, "world_size", options.world_size);
  check_place("rank", rank, "world_size", world_size);
  if (world_size > INT_MAX) refuse_url(url, "world_size is too large");
  address.rank = static_cast<int>(rank);
  address.world_size = static_cast<int>(world_size);
  return address;
}

}  // namespace libddp
