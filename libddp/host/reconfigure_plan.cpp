#include "libddp/host/reconfigure_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "libddp/base/error.h"
#include "libddp/base/fnv.h"

namespace libddp {
namespace {

std::string name_of(std::int64_t uuid) { return fmt::format("reconfigure(uuid={})", uuid); }

[[noreturn]] void refuse_plan(std::int64_t uuid, const std::string& what, const std::string& hint) {
  throw ArgumentError(fmt::format("libddp {}: {}. Hint: {}.", name_of(uuid), what, hint));
}

std::string digest_of(const std::vector<MemberHandle>& members) {
  std::uint64_t hash = kFnvBegin;
  for (const MemberHandle& member : members) hash = fnv1a(member.instance, hash);
  return fmt::format("{:016x}", hash);
}

}  // namespace

ReconfigurePlan::ReconfigurePlan(const ReconfigureRequest& request, const std::string& own_handle)
    : uuid_(request.uuid) {
  const std::size_t count = request.handles.size();
  if (count == 0 || count > kMaxMembers) {
    refuse_plan(
        uuid_, fmt::format("{} handles", count),
        fmt::format("pass one per member, this process's own included, at most {}", kMaxMembers));
  }
  for (std::size_t i = 0; i < count; ++i) {
    try {
      members_.push_back(MemberHandle::decode(request.handles[i]));
    } catch (const ArgumentError& error) {
      throw ArgumentError(fmt::format("libddp {}: handles[{}]: {}.", name(), i, error.what()));
    }
  }
  if (!request.is_ordered) {
    std::sort(members_.begin(), members_.end(), [](const auto& one, const auto& other) {
      return std::tie(one.host_key, one.instance) < std::tie(other.host_key, other.instance);
    });
  }
  refuse_twice();
  const std::string own = MemberHandle::decode(own_handle).instance;
  for (int rank = 0; rank < world_size(); ++rank) {
    const std::string& instance = members_[static_cast<std::size_t>(rank)].instance;
    if (instance == own) rank_ = rank;
    if (instance < lead().instance) lead_ = rank;
  }
  if (rank_ < 0) {
    refuse_plan(uuid_, fmt::format("this process's own handle is not among the {} given", count),
                "only members call reconfigure; get the handle of each from its own process, after "
                "its init_process_group");
  }
  digest_ = digest_of(members_);
}

std::string ReconfigurePlan::name() const { return name_of(uuid_); }

void ReconfigurePlan::refuse_twice() const {
  std::set<std::string> seen;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (seen.insert(members_[i].instance).second) continue;
    refuse_plan(
        uuid_,
        fmt::format("handles must be unique, and that of {} is there twice", members_[i].who()),
        "pass one handle per member");
  }
}

}  // namespace libddp
