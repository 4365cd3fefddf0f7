#include "libddp/base/env.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strings.h>

#include <charconv>
#include <cstdlib>

#include "libddp/base/error.h"

namespace libddp {
namespace {

bool equal_ignoring_case(const std::string& text, std::string_view other) {
  return text.size() == other.size() && ::strncasecmp(text.c_str(), other.data(), text.size()) == 0;
}

[[noreturn]] void refuse(const char* variable, const std::string& value,
                         const std::string& expected) {
  throw ArgumentError(
      fmt::format("libddp: environment variable {}='{}' is not {}. Hint: correct or unset {}.",
                  variable, value, expected, variable));
}

}  // namespace

std::optional<std::string> env_text(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<long> env_integer(const char* variable, long minimum, long maximum) {
  const std::optional<std::string> text = env_text(variable);
  if (!text) return std::nullopt;
  long number = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, number);
  if (error != std::errc() || stop != end || number < minimum || number > maximum) {
    refuse(variable, *text, fmt::format("an integer from {} to {}", minimum, maximum));
  }
  return number;
}

bool env_flag(const char* variable, bool default_value) {
  const std::optional<std::string> text = env_text(variable);
  if (!text) return default_value;
  for (std::string_view word : {"1", "true", "yes", "on"}) {
    if (equal_ignoring_case(*text, word)) return true;
  }
  for (std::string_view word : {"0", "false", "no", "off"}) {
    if (equal_ignoring_case(*text, word)) return false;
  }
  refuse(variable, *text, "a flag (1, true, yes, on, 0, false, no, off)");
}

std::optional<std::string> env_choice(const char* variable,
                                      std::initializer_list<std::string_view> choices) {
  const std::optional<std::string> text = env_text(variable);
  if (!text) return std::nullopt;
  for (std::string_view choice : choices) {
    if (equal_ignoring_case(*text, choice)) return std::string(choice);
  }
  refuse(variable, *text,
         fmt::format("one of {}", fmt::join(choices.begin(), choices.end(), ", ")));
}

}  // namespace libddp
