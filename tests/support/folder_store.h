#pragma once

// A KeyValueStore for forked ranks: one file per key in a temporary folder.
//
//   FolderStore store;                       // in the parent, before fork_ranks
//   fork_ranks(2, [&](int rank) { bootstrap(store, ...); return ""; });

#include <string>

#include "libddp/bootstrap/key_value_store.h"
#include "tests/support/temporary_folder.h"

namespace libddp::test {

class FolderStore : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  std::string path_of(const std::string& key) const;

  TemporaryFolder folder_;
};

}  // namespace libddp::test
