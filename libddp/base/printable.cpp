#include "libddp/base/printable.h"

#include <fmt/format.h>

#include <cstddef>

namespace libddp {
namespace {

unsigned byte_at(std::string_view text, std::size_t at) {
  return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
}

/// Length of the UTF-8 character of several bytes that begins here; 0 if none does, or a C1
/// control.
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const unsigned first = byte_at(text, at);
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte_at(text, at + i) & 0xc0) != 0x80) return 0;
  }
  const unsigned second = byte_at(text, at + 1);
  const bool is_overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool is_beyond = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  const bool is_control = first == 0xc2 && second < 0xa0;
  return is_overlong || is_beyond || is_control ? 0 : length;
}

std::string escape_controls(std::string_view text, bool keeps_lines) {
  std::string shown;
  shown.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const unsigned byte = byte_at(text, at);
    const bool is_blank = c == '\n' || c == '\t';
    if ((byte >= 0x20 && byte < 0x7f) || (is_blank && keeps_lines)) {
      shown += c;
    } else if (const std::size_t length = utf8_length(text, at); length > 0) {
      shown += text.substr(at, length);
      at += length;
      continue;
    } else if (is_blank) {
      shown += c == '\n' ? "\\n" : "\\t";
    } else {
      shown += fmt::format("\\x{:02x}", byte);
    }
    ++at;
  }
  return shown;
}

}  // namespace

std::string printable(std::string_view text) { return escape_controls(text, false); }

std::string printable_lines(std::string_view text) { return escape_controls(text, true); }

}  // namespace libddp
