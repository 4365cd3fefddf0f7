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
    const std::lock_guard lock(mutex_);
    // The one before ends first: two of them take twice the memory.
    objects_.reset();
    if (is_abandoned_) throw SnapshotError("libddp snapshot: the keeper ends.");
  }
  if (!is_known) {
    auto objects = std::make_shared<HelperObjects>(storage.helper, storage.folder);
    const std::lock_guard lock(mutex_);
    if (is_abandoned_) throw SnapshotError("libddp snapshot: the keeper ends.");
    objects_ = std::move(objects);
    helper_ = storage.helper;
  }
  return std::make_unique<ObjectFolder>(objects_);
}

void OpenedStorage::abandon() {
  const std::lock_guard lock(mutex_);
  is_abandoned_ = true;
  if (objects_) objects_->abandon();
}

}  // namespace libddp
