#include "libddp/transport/link_settings.h"

#include <fmt/format.h>

#include "libddp/base/env.h"

namespace libddp {
namespace {

constexpr const char* kSocketsVariable = "LIBDDP_SOCKETS_PER_LINK";
constexpr const char* kDtypeVariable = "LIBDDP_WIRE_DTYPE";

}  // namespace

LinkSettings LinkSettings::from_environment() {
  LinkSettings settings;
  settings.sockets_per_link = static_cast<int>(
      env_integer(kSocketsVariable, 1, kMaxSockets).value_or(settings.sockets_per_link));
  if (const auto choice = env_choice(kDtypeVariable, {"float32", "bfloat16"})) {
    settings.wire_dtype = *choice == "bfloat16" ? Dtype::BFloat16 : Dtype::Float32;
  }
  return settings;
}

std::string LinkSettings::to_text() const {
  return fmt::format("{}={} {}={}", kSocketsVariable, sockets_per_link, kDtypeVariable,
                     name(wire_dtype));
}

}  // namespace libddp
