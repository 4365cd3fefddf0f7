#include "libddp/base/group_identity.h"

#include <fmt/format.h>

#include "libddp/base/error.h"

namespace libddp {

std::string GroupIdentity::where() const {
  return fmt::format("libddp[group {}, rank {}/{}]", name, rank, world_size);
}

void CallSite::refuse(const std::string& problem, const std::string& hint) const {
  throw ArgumentError(fmt::format("{} {}: {}. Hint: {}.", group.where(), operation, problem, hint));
}

}  // namespace libddp
