#pragma once

// Why a bootstrap cannot succeed, shared by all its ranks: the first cause written into the store
// is the one that every rank throws. Thread rule: free functions; as the store.
//
//   GroupFailure agreed = publish_failure(store, failure);   // mine, or the one that was first
//   throw_failure(agreed, "libddp[group world, rank 0/2] bootstrap: " + agreed.message);

#include <optional>
#include <string>

#include "libddp/base/group_failure.h"
#include "libddp/bootstrap/key_value_store.h"

namespace libddp {

/// As the store has it; the text may come from anybody: printable, and not longer than 16 KiB.
std::string encode_failure(const GroupFailure& failure);
/// Throws StoreError if `text` is no failure.
GroupFailure decode_failure(const std::string& text);

/// The failure in the store, if any rank has published one.
std::optional<GroupFailure> find_failure(KeyValueStore& store);

/// Publishes `failure` unless another rank was first; returns the one that counts.
GroupFailure publish_failure(KeyValueStore& store, const GroupFailure& failure);

}  // namespace libddp
