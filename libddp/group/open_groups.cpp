#include "libddp/group/open_groups.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

namespace libddp {
namespace {

struct OpenGroups {
  std::mutex mutex;
  std::vector<std::weak_ptr<ProcessGroup>> groups;
};

OpenGroups& registry() {
  static auto* const groups = new OpenGroups;  // groups may be made after static objects are gone
  return *groups;
}

}  // namespace

Group opened(Group group) {
  OpenGroups& open = registry();
  const std::lock_guard lock(open.mutex);
  const auto gone = [](const std::weak_ptr<ProcessGroup>& each) { return each.expired(); };
  open.groups.erase(std::remove_if(open.groups.begin(), open.groups.end(), gone),
                    open.groups.end());
  open.groups.push_back(group);
  return group;
}

std::vector<Group> open_groups() {
  OpenGroups& open = registry();
  const std::lock_guard lock(open.mutex);
  std::vector<Group> found;
  for (const auto& each : open.groups) {
    if (Group group = each.lock()) found.push_back(std::move(group));
  }
  return found;
}

}  // namespace libddp
