#include "libddp/group/required_group.h"

#include <fmt/format.h>

#include "libddp/base/error.h"

namespace libddp {

Group required_group(Group group, const char* who) {
  if (group) return group;
  throw ArgumentError(fmt::format(
      "libddp: {}: the process group is null. Hint: pass what init_process_group() gave, or a part "
      "of it from split(), which is null on ranks that are not in the part.",
      who));
}

}  // namespace libddp
