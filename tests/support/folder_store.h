#pragma once

// A KeyValueStore for forked ranks: one file per key in a temporary folder.
//
//   FolderStore store;                       // in the parent, before fork_ranks
//   fork_ranks(2, [&](int rank) { meet(store, ...); return ""; });

#include <string>

#include <sys/types.h>

#include "libddp/transport/key_value_store.h"

namespace libddp::test {

class FolderStore : public KeyValueStore {
 public:
  FolderStore();
  /// Removes the folder, in the process that made it.
  ~FolderStore() override;
  FolderStore(const FolderStore&) = delete;
  FolderStore& operator=(const FolderStore&) = delete;

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  std::string path_of(const std::string& key) const;

  std::string folder_;
  pid_t owner_;
};

}  // namespace libddp::test
