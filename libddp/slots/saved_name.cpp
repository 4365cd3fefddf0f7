#include "libddp/slots/saved_name.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace libddp {
namespace {

/// More do not fit into 64 bits.
constexpr std::size_t kMostDigits = 18;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

}  // namespace

std::string name_of(const SavedStep& saved) {
  return fmt::format("step-{}.{}", saved.step, saved.sequence);
}

bool NameReader::skip(std::string_view text) {
  if (!left_.starts_with(text)) return false;
  left_.remove_prefix(text.size());
  return true;
}

SavedStep as_stored(const SavedStep& saved) {
  return {.step = saved.step, .sequence = saved.sequence};
}

std::optional<SavedStep> NameReader::saved_step() {
  if (!skip("step-")) return std::nullopt;
  const auto step = number(kMostDigits);
  if (!step || !skip(".")) return std::nullopt;
  const auto sequence = number(kMostDigits);
  if (!sequence) return std::nullopt;
  return SavedStep{.step = *step, .sequence = static_cast<std::uint64_t>(*sequence)};
}

std::optional<std::int64_t> NameReader::number(std::size_t most) {
  const std::string_view digits = take_while(is_digit);
  if (digits.empty() || digits.size() > most) return std::nullopt;
  std::int64_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

std::string_view NameReader::word() {
  return take_while([](char c) { return is_digit(c) || is_letter(c); });
}

template <typename Belongs>
std::string_view NameReader::take_while(Belongs belongs) {
  const auto end = std::find_if_not(left_.begin(), left_.end(), belongs);
  const auto count = static_cast<std::size_t>(end - left_.begin());
  const std::string_view taken = left_.substr(0, count);
  left_.remove_prefix(count);
  return taken;
}

}  // namespace libddp
