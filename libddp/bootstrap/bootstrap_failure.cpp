#include "libddp/bootstrap/bootstrap_failure.h"

#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <string_view>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr const char* kKey = "error";
constexpr const char* kTurnKey = "error_turn";
constexpr RecordForm kFailureForm{"libddp-failure-1", "the store holds no failure"};
constexpr std::size_t kMaxCauseBytes = 16u << 10;
// Between a rank's turn and its text lies one call to the store.
constexpr std::chrono::seconds kTextPatience{2};

/// As much of `text` as fits into `limit` bytes in whole characters of UTF-8.
std::string_view beginning(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) --limit;
  return text.substr(0, limit);
}

}  // namespace

std::string encode_failure(const GroupFailure& failure) {
  return RecordWriter(kFailureForm)
      .integer(static_cast<int>(failure.kind))
      .integer(failure.peer_rank)
      .integer(failure.peer_pid)
      .field(beginning(failure.message, kMaxCauseBytes))
      .text();
}

GroupFailure decode_failure(const std::string& text) {
  RecordReader fields(kFailureForm, text);
  GroupFailure failure;
  failure.kind = static_cast<GroupFailure::Kind>(
      fields.integer(0, static_cast<int>(GroupFailure::Kind::Network)));
  failure.peer_rank = fields.integer(-1);
  failure.peer_pid = fields.integer(0);
  failure.message = printable(fields.field());
  fields.end();
  return failure;
}

std::optional<GroupFailure> find_failure(KeyValueStore& store) {
  const std::optional<std::string> text = store.try_get(kKey);
  if (!text) return std::nullopt;
  return decode_failure(*text);
}

GroupFailure publish_failure(KeyValueStore& store, const GroupFailure& failure) {
  const std::string text = encode_failure(failure);
  const GroupFailure told = decode_failure(text);  // in the words that the others read
  if (store.add(kTurnKey, 1) == 1) {
    store.set(kKey, text);
    return told;
  }
  const std::optional<std::string> first = store.wait_get(kKey, Deadline::after(kTextPatience));
  if (first) return decode_failure(*first);
  // Who had the turn has died, or was no rank.
  store.set(kKey, text);
  return told;
}

}  // namespace libddp
