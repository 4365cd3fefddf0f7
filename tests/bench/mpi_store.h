#pragma once

// A KeyValueStore for the ranks of an MPI program, so that they can meet before they are
// compared: one file per key in a temporary folder that rank 0 makes and names to the others.
// Thread rule: one thread; construction and destruction are collective over MPI_COMM_WORLD.
//
//   MpiStore store;
//   store.set("peer/0", "...");

#include <string>

#include "libddp/bootstrap/key_value_store.h"

namespace libddp::bench {

class MpiStore : public KeyValueStore {
 public:
  MpiStore();
  ~MpiStore() override;
  MpiStore(const MpiStore&) = delete;
  MpiStore& operator=(const MpiStore&) = delete;

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  /// Counters are files too, changed under a lock.
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  std::string path_of(std::string key) const;

  std::string folder_;
  int rank_ = 0;
};

}  // namespace libddp::bench
