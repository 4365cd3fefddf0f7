#pragma once

// Where a group's store is and who this process is there: from the environment or from a URL.
//
// What is missing or contradictory is an ArgumentError that names the variable (or the URL) and its
// value, before anything is opened. Arguments win over the environment, as in torch.
// Thread rule: free functions; they read the environment.
//
//   Address address = read_environment(options);
//   Address address = read_url("tcp://127.0.0.1:29500?rank=0&world_size=2", options);

#include <optional>
#include <string>

#include "libddp/rendezvous/rendezvous.h"

namespace libddp {

struct Address {
  enum class Kind { Alone, Tcp, File };
  Kind kind = Kind::Alone;
  int rank = 0;
  int world_size = 1;
  /// Tcp
  std::string host;
  std::uint16_t port = 0;
  /// Tcp: the launcher's agent holds the store, no rank does.
  bool is_agent_store = false;
  /// Prefix of the agent's store for this attempt; empty = none.
  std::string prefix;
  /// File
  std::string path;
};

/// RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; TORCHELASTIC_USE_AGENT_STORE and
/// TORCHELASTIC_RESTART_COUNT under torchrun.
Address read_environment(const RendezvousOptions& options);

/// tcp://host:port and file:///path, with ?rank= and &world_size= where options do not say it.
Address read_url(const std::string& url, const RendezvousOptions& options);

/// Throws ArgumentError unless 0 <= rank < world_size; the names say where they came from.
void check_place(const std::string& rank_name, long rank, const std::string& world_size_name,
                 long world_size);

}  // namespace libddp
