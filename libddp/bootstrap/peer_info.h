#pragma once

// What a rank publishes about itself before a bootstrap, as short text in the store.
// Thread rule: values.
//
//   store.set("peer/3", info.encode());
//   PeerInfo info = PeerInfo::decode(*store.try_get("peer/3"));

#include <sys/types.h>

#include <optional>
#include <string>

#include "libddp/bootstrap/bootstrap_failure.h"

namespace libddp {

struct PeerInfo {
  int rank = 0;
  int world_size = 0;
  pid_t pid = 0;
  std::string host;
  std::string boot_id;
  std::string network_namespace;
  std::string pid_namespace;
  std::string socket_name;
  /// Shown by whoever connects: proof that it has read the store.
  std::string token;
  std::string agreement;
  std::string note;

  std::string encode() const;
  /// Throws StoreError if `text` is no description.
  static PeerInfo decode(const std::string& text);

  /// Equal for ranks that can share memory and meet over Unix sockets.
  std::string host_key() const { return boot_id + '/' + network_namespace; }
  /// "rank 3 (pid 4711)".
  std::string who() const;
};

/// Why these two ranks cannot be in one group, if they cannot: other world size, other agreement.
/// Both ranks find the same words.
std::optional<GroupFailure> find_disagreement(const PeerInfo& one, const PeerInfo& other);

}  // namespace libddp
