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

std::string BootstrapFailure::encode() const {
  return RecordWriter(kFailureForm)
      .integer(static_cast<int>(kind))
      .integer(rank)
      .integer(pid)
      .field(beginning(cause, kMaxCauseBytes))
      .text();
}

BootstrapFailure BootstrapFailure::decode(const std::string& text) {
  RecordReader fields(kFailureForm, text);
  BootstrapFailure failure;
  failure.kind = static_cast<Kind>(fields.integer(0, static_cast<int>(Kind::Network)));
  failure.rank = fields.integer(-1);
  failure.pid = fields.integer(0);
  failure.cause = printable(fields.field());
  fields.end();
  return failure;
}

std::optional<BootstrapFailure> find_failure(KeyValueStore& store) {
  const std::optional<std::string> text = store.try_get(kKey);
  if (!text) return std::nullopt;
  return BootstrapFailure::decode(*text);
}

BootstrapFailure publish_failure(KeyValueStore& store, const BootstrapFailure& failure) {
  const std::string text = failure.encode();
  const BootstrapFailure told =
      BootstrapFailure::decode(text);  // in the words that the others read
  if (store.add(kTurnKey, 1) == 1) {
    store.set(kKey, text);
    return told;
  }
  const std::optional<std::string> first = store.wait_get(kKey, Deadline::after(kTextPatience));
  if (first) return BootstrapFailure::decode(*first);
  // Who had the turn has died, or was no rank.
  store.set(kKey, text);
  return told;
}

void throw_failure(const std::string& where, const BootstrapFailure& failure) {
  const std::string message = fmt::format("{}: {}", where, failure.cause);
  switch (failure.kind) {
    case BootstrapFailure::Kind::Timeout:
      throw TimeoutError(message);
    case BootstrapFailure::Kind::Network:
      throw NetworkError(message);
    case BootstrapFailure::Kind::Peer:
      break;
  }
  throw PeerError(message, failure.rank, failure.pid);
}

}  // namespace libddp
