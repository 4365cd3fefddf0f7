#include "libddp/bootstrap/record.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "libddp/base/build_info.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/bootstrap/key_value_store.h"

namespace libddp {
namespace {

constexpr std::size_t kMaxShownBytes = 200;
constexpr std::size_t kMaxShownWordBytes = 32;

std::string shown_word(std::string_view word) {
  return printable(word.substr(0, kMaxShownWordBytes));
}

/// The number that `text` is, if it is one and written in the only way there is.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || std::to_string(number) != text) return std::nullopt;
  return number;
}

/// Earlier formats had line ends between the fields.
std::string_view first_word(std::string_view text) {
  return text.substr(0, text.find_first_of(" \n"));
}

/// "libddp-peer-" of "libddp-peer-2".
std::string_view stem(std::string_view format) { return format.substr(0, format.rfind('-') + 1); }

}  // namespace

RecordWriter::RecordWriter(const RecordForm& form) : RecordWriter(form, libddp::version()) {}

RecordWriter::RecordWriter(const RecordForm& form, std::string_view version)
    : text_(fmt::format("{} {}", form.format, version)) {}

RecordWriter& RecordWriter::field(std::string_view bytes) {
  text_ += fmt::format(" {}:", bytes.size());
  text_ += bytes;
  return *this;
}

RecordWriter& RecordWriter::integer(int number) { return field(std::to_string(number)); }

RecordReader::RecordReader(const RecordForm& form, const std::string& text)
    : form_(form), text_(text), rest_(text) {
  const std::string_view format = first_word(rest_);
  rest_.remove_prefix(format.size());
  if (rest_.starts_with(' ')) version_ = first_word(rest_.substr(1));
  if (!version_.empty()) rest_.remove_prefix(1 + version_.size());
  if (format != form_.format && format.starts_with(stem(form_.format))) {
    throw StoreError(fmt::format(
        "libddp: {} of this version: a rank runs {} ('{}'), this one libddp {} "
        "('{}'). Hint: all ranks must run the same libddp version.",
        form_.complaint, version_.empty() ? "another version" : "libddp " + shown_word(version_),
        shown_word(format), libddp::version(), form_.format));
  }
  if (format != form_.format || version_.empty() || text.size() > kMaxValueBytes) refuse();
}

std::string RecordReader::field() {
  const std::size_t colon = rest_.find(':');
  if (!rest_.starts_with(' ') || colon == std::string_view::npos) refuse();
  const auto size = parse_number<std::size_t>(rest_.substr(1, colon - 1));
  rest_.remove_prefix(colon + 1);
  if (!size || *size > rest_.size()) refuse();
  const std::string_view bytes = rest_.substr(0, *size);
  rest_.remove_prefix(*size);
  return std::string(bytes);
}

int RecordReader::integer(int low, int high) {
  const auto number = parse_number<int>(field());
  if (!number || *number < low || *number > high) refuse();
  return *number;
}

void RecordReader::end() const {
  if (!rest_.empty()) refuse();
}

void RecordReader::refuse() const {
  throw StoreError(fmt::format(
      "libddp: {} but '{}'. Hint: all ranks must run the same libddp version and use a store of "
      "this run only.",
      form_.complaint, printable(text_.substr(0, kMaxShownBytes))));
}

}  // namespace libddp
