#pragma once

// What makes the entries of one bootstrap believable in a store that strangers can write to: a key
// that only this bootstrap has. Used by bootstrap.cpp, with a run key only.
//
// NOTE [Session]
// 1. Every rank publishes a join entry: who it is, its world size, and a nonce; sealed with the run
//    key.
// 2. From all nonces comes the session key. As the own nonce is new, whatever is sealed with that
//    key was sealed in this bootstrap, by a rank of it: entries of earlier runs cannot be replayed.
// 3. Descriptions and addresses are sealed with the session key, connections begin with a proof of
// it. A failure may have to be told before step 2: it is sealed with the run key, names its
// author's nonce, and is believed only if that is the nonce of the author's join entry. Thread
// rule: one thread.
//
//   BootstrapSession session(store, options);
//   session.publish();
//   while (!session.try_entry(rank)) context.look_around();
//   session.open();                        // then entries() and key() may be used

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/bootstrap/sealed_store.h"

namespace libddp {

struct JoinEntry {
  std::string version;
  int rank = 0;
  int world_size = 0;
  pid_t pid = 0;
  std::string nonce;

  std::string encode() const;
  /// Throws StoreError if `text` is no join entry of this format; a newer one is named.
  static JoinEntry decode(const std::string& text);
};

class BootstrapSession {
 public:
  /// REQUIRES: options.key.
  BootstrapSession(KeyValueStore& store, const BootstrapOptions& options);
  ~BootstrapSession();

  void publish();
  /// Reads all join entries in one request; false if one has not come.
  bool try_all_entries();
  /// The rank's join entry, if it has come; from then on it stays the same.
  const JoinEntry* try_entry(int rank);
  bool has_entry(int rank) const {
    return join_entries_[static_cast<std::size_t>(rank)].has_value();
  }
  const JoinEntry& own() const { return own_; }
  /// REQUIRES: all join entries have come.
  void open();
  bool is_open() const { return entries_ != nullptr; }

  /// The join entry in the store of whoever has this process's rank.
  std::optional<JoinEntry> find_other_claimant(Deadline deadline);
  /// For descriptions and addresses. REQUIRES: is_open().
  KeyValueStore& entries() { return *entries_; }
  const std::shared_ptr<const RunKey>& key() const { return session_key_; }
  /// For failures, at any time.
  KeyValueStore& failures() { return *failures_; }

 private:
  class FailureStore;

  bool take(int rank, const std::string& text);

  const BootstrapOptions& options_;
  SealedStore sealed_;
  KeyValueStore& below_;
  JoinEntry own_;
  std::vector<std::optional<JoinEntry>> join_entries_;
  std::shared_ptr<const RunKey> session_key_;
  std::unique_ptr<SealedStore> entries_;
  std::unique_ptr<KeyValueStore> failures_;
};

}  // namespace libddp
