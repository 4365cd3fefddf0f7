#include "libddp/transport/link_settings.h"

#include <fmt/format.h>

#include "libddp/base/env.h"

namespace libddp {
namespace {

constexpr const char* kSocketsVariable = "LIBDDP_SOCKETS_PER_LINK";

}  // namespace

LinkSettings LinkSettings::from_environment() {
  LinkSettings settings;
  settings.sockets_per_link = static_cast<int>(
      env_integer(kSocketsVariable, 1, kMaxSockets).value_or(settings.sockets_per_link));
  return settings;
}

std::string LinkSettings::to_text() const {
  return fmt::format("{}={}", kSocketsVariable, sockets_per_link);
}

}  // namespace libddp
