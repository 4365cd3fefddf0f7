#pragma once

// What a job stores into, opened: a folder, or objects through a helper that is started when the
// first save goes there and serves the next ones.
// Thread rule: one thread; abandon() from any.
//
//   OpenedStorage storage;
//   storage.open(request.storage)->list();

#include <memory>
#include <mutex>
#include <string>

#include "libddp/keeper/helper_objects.h"
#include "libddp/keeper/keeper_message.h"
#include "libddp/slots/snapshot_store.h"

namespace libddp {

class OpenedStorage {
 public:
  /// Throws SnapshotError.
  std::unique_ptr<SnapshotStore> open(const KeeperStorage& storage);
  /// What waits for a helper fails at once, now and later.
  void abandon();

 private:
  /// In place of the one before. Throws SnapshotError once it is abandoned.
  void keep(std::shared_ptr<HelperObjects> objects);

  std::mutex mutex_;
  std::shared_ptr<HelperObjects> objects_;
  StorageHelper helper_;
  bool is_abandoned_ = false;
};

}  // namespace libddp
