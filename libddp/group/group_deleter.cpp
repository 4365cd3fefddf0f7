#include "libddp/group/group_deleter.h"

#include <atomic>

namespace libddp {
namespace {

std::atomic<GroupDeleter> installed_deleter{nullptr};

}  // namespace

GroupDeleter set_group_deleter(GroupDeleter deleter) { return installed_deleter.exchange(deleter); }

void delete_as_installed(ProcessGroup* group) noexcept {
  const GroupDeleter deleter = installed_deleter.load();
  if (deleter == nullptr) {
    delete group;
  } else {
    deleter(group);
  }
}

}  // namespace libddp
