#pragma once

// A store whose values carry a tag of the run key, for stores that strangers can write to. A value
// that was not sealed with this key, for this key name and context, is as if it were not there.
//
// Counters (add) are not sealed: whoever reads one must not believe it alone.
// Thread rule: as the store below.
//
//   SealedStore mine(store, key, "group world");
//   mine.set("peer/0", text);        // below: "libddp-sealed-1 <tag> <text>"
//   mine.try_get("peer/1");          // nothing if a stranger wrote it

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libddp/bootstrap/key_value_store.h"
#include "libddp/bootstrap/run_key.h"

namespace libddp {

class SealedStore : public KeyValueStore {
 public:
  SealedStore(KeyValueStore& below, std::shared_ptr<const RunKey> key, std::string context);

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  std::optional<std::vector<std::string>> try_get_all(
      const std::vector<std::string>& keys) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

  std::string seal(const std::string& key, const std::string& value) const;
  /// The value of a sealed text; nothing if the seal is another's.
  std::optional<std::string> open(const std::string& key, const std::string& text) const;

 private:
  void report(const std::string& key);

  KeyValueStore& below_;
  const std::shared_ptr<const RunKey> key_;
  const std::string context_;
  std::mutex mutex_;
  std::set<std::string> reported_;
};

}  // namespace libddp
