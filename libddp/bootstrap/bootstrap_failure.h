#pragma once

// Why a bootstrap cannot succeed, shared by all its ranks: the first cause written into the store
// is the one that every rank throws. Thread rule: free functions; as the store.
//
//   BootstrapFailure agreed = publish_failure(store, failure);   // mine, or the one that was first
//   throw_failure("libddp[group world, rank 0/2] bootstrap", agreed);

#include <sys/types.h>

#include <optional>
#include <string>

#include "libddp/bootstrap/key_value_store.h"

namespace libddp {

struct BootstrapFailure {
  enum class Kind { Peer, Timeout, Network };

  Kind kind = Kind::Peer;
  /// The culprit; -1 where several ranks disagree.
  int rank = -1;
  pid_t pid = 0;
  /// What happened, and the hint.
  std::string cause;

  std::string encode() const;
  /// Throws StoreError if `text` is no failure.
  static BootstrapFailure decode(const std::string& text);
};

/// The failure in the store, if any rank has published one.
std::optional<BootstrapFailure> find_failure(KeyValueStore& store);

/// Publishes `failure` unless another rank was first; returns the one that counts.
BootstrapFailure publish_failure(KeyValueStore& store, const BootstrapFailure& failure);

/// Throws PeerError, TimeoutError or NetworkError: "<where>: <cause>".
[[noreturn]] void throw_failure(const std::string& where, const BootstrapFailure& failure);

}  // namespace libddp
