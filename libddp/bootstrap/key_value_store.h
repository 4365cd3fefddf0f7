#pragma once

// The few store operations that a bootstrap needs, so that the core does not depend on torch.
// `rendezvous/torch_store.h` gives c10d::Store this shape; InMemoryStore serves ranks that are
// threads. Thread rule: implementations may be called from any thread.

#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"

namespace libddp {

/// More than any entry of a bootstrap needs; a larger one is no entry.
constexpr std::size_t kMaxValueBytes = 64u << 10;

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Value of `key` if it is set now.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Waits until `key` is set; nullopt if the deadline passes first.
  virtual std::optional<std::string> wait_get(const std::string& key, Deadline deadline) = 0;
  /// The values of `keys`, in their order, if all are set now. A store that can answer for many
  /// keys in one request overrides it.
  virtual std::optional<std::vector<std::string>> try_get_all(const std::vector<std::string>& keys);
  /// Adds to a counter that starts at 0; returns the sum.
  virtual long add(const std::string& key, long amount) = 0;
  virtual void remove(const std::string& key) = 0;
};

/// One process's store, for tests and for ranks that are threads.
class InMemoryStore : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace libddp
