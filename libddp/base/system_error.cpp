#include "libddp/base/system_error.h"

#include <fmt/format.h>

#include <system_error>

namespace libddp {

std::string errno_text(std::string_view call, int error) {
  return fmt::format("{}: {} (errno {})", call, std::system_category().message(error), error);
}

}  // namespace libddp
