#include "libddp/transport/link_settings.h"

#include <fmt/format.h>

#include "libddp/base/env.h"
#include "libddp/base/error.h"

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

LinkSettings LinkSettings::chosen(std::optional<int> sockets_per_link,
                                  std::optional<Dtype> wire_dtype) {
  LinkSettings settings = from_environment();
  if (sockets_per_link) {
    if (*sockets_per_link < 1 || *sockets_per_link > kMaxSockets) {
      throw ArgumentError(
          fmt::format("libddp: sockets_per_link={} is not an integer from 1 to {}. Hint: leave it "
                      "out for one connection.",
                      *sockets_per_link, kMaxSockets));
    }
    settings.sockets_per_link = *sockets_per_link;
  }
  if (wire_dtype) {
    if (*wire_dtype != Dtype::Float32 && *wire_dtype != Dtype::BFloat16) {
      throw ArgumentError(
          fmt::format("libddp: wire_dtype={} is neither float32 nor bfloat16. Hint: bfloat16 "
                      "halves the bytes of float32 sums between hosts.",
                      name(*wire_dtype)));
    }
    settings.wire_dtype = *wire_dtype;
  }
  return settings;
}

std::string LinkSettings::to_text() const {
  return fmt::format("sockets_per_link={} wire_dtype={}", sockets_per_link, name(wire_dtype));
}

}  // namespace libddp
