#include "libddp/base/check.h"

#include <fmt/format.h>

#include "libddp/base/error.h"

namespace libddp {

void check_failed(const char* condition, const char* file, int line, const std::string& detail) {
  throw Error(fmt::format(
      "libddp: internal error: '{}' does not hold ({}:{}): {}. Hint: this is a defect of "
      "libddp; please report it with this line.",
      condition, file, line, detail));
}

}  // namespace libddp
