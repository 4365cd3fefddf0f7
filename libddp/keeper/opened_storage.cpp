#include "libddp/keeper/opened_storage.h"

#include "libddp/base/error.h"
#include "libddp/slots/object_folder.h"
#include "libddp/slots/snapshot_folder.h"

namespace libddp {

std::unique_ptr<SnapshotStore> OpenedStorage::open(const KeeperStorage& storage) {
  if (storage.helper.program.empty()) return std::make_unique<SnapshotFolder>(storage.folder);
  const bool is_known = objects_ && !objects_->is_lost() && helper_ == storage.helper &&
                        objects_->address() == storage.folder;
  if (!is_known) {
    // The one before ends first: two of them take twice the memory.
    keep(nullptr);
    keep(std::make_shared<HelperObjects>(storage.helper, storage.folder));
    helper_ = storage.helper;
  }
  return std::make_unique<ObjectFolder>(objects_);
}

void OpenedStorage::keep(std::shared_ptr<HelperObjects> objects) {
  const std::lock_guard lock(mutex_);
  if (is_abandoned_) throw SnapshotError("libddp snapshot: the keeper ends.");
  objects_ = std::move(objects);
}

void OpenedStorage::abandon() {
  const std::lock_guard lock(mutex_);
  is_abandoned_ = true;
  if (objects_) objects_->abandon();
}

}  // namespace libddp
