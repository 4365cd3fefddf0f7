#pragma once

// Typed reading of environment variables. A variable that is unset or empty is "not given"; a value
// that cannot be read is an ArgumentError that names the variable, the value and what is allowed.
// Thread rule: any thread, as long as nobody calls setenv at the same time.
//
//   std::optional<long> rank = env_integer("RANK", 0, INT_MAX);
//   bool pin = env_flag("LIBDDP_PIN", true);

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace libddp {

std::optional<std::string> env_text(const char* variable);

/// A decimal integer within [minimum, maximum].
std::optional<long> env_integer(const char* variable, long minimum, long maximum);

/// 1/0, true/false, yes/no, on/off, in any case.
bool env_flag(const char* variable, bool default_value);

/// One of `choices`, in any case; returned in the spelling of `choices`.
std::optional<std::string> env_choice(const char* variable,
                                      std::initializer_list<std::string_view> choices);

}  // namespace libddp
