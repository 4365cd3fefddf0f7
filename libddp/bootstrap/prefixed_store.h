#pragma once

// A part of a store: every key gets a prefix, so that groups and bootstraps do not see each
// other's. Thread rule: as the store below.
//
//   PrefixedStore mine(store, "group/world/1/");
//   mine.set("peer/0", text);                     // key "group/world/1/peer/0" below

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/bootstrap/key_value_store.h"

namespace libddp {

class PrefixedStore : public KeyValueStore {
 public:
  PrefixedStore(std::shared_ptr<KeyValueStore> below, std::string prefix);

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  std::optional<std::vector<std::string>> try_get_all(
      const std::vector<std::string>& keys) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  std::shared_ptr<KeyValueStore> below_;
  std::string prefix_;
};

}  // namespace libddp
