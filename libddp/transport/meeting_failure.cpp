#include "libddp/transport/meeting_failure.h"

#include <fmt/format.h>

#include <chrono>
#include <sstream>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"

namespace libddp {
namespace {

constexpr const char* kKey = "error";
constexpr const char* kTurnKey = "error_turn";
constexpr std::size_t kMaxFailureBytes = 16u << 10;
// Between a rank's turn and its text lies one call to the store.
constexpr std::chrono::seconds kTextPatience{2};

}  // namespace

std::string MeetingFailure::encode() const {
  return fmt::format("{} {} {} {}", static_cast<int>(kind), rank, pid, cause);
}

MeetingFailure MeetingFailure::decode(const std::string& text) {
  MeetingFailure failure;
  int kind = -1;
  std::istringstream stream(text.substr(0, kMaxFailureBytes));
  stream >> kind >> failure.rank >> failure.pid;
  if (!stream || kind < 0 || kind > static_cast<int>(Kind::Network)) {
    throw StoreError(fmt::format("libddp: the store holds no meeting failure but '{}'.",
                                 printable(text.substr(0, 200))));
  }
  failure.kind = static_cast<Kind>(kind);
  stream.get();
  failure.cause = printable(std::string(std::istreambuf_iterator<char>(stream), {}));
  return failure;
}

std::optional<MeetingFailure> find_failure(KeyValueStore& store) {
  const std::optional<std::string> text = store.try_get(kKey);
  if (!text) return std::nullopt;
  return MeetingFailure::decode(*text);
}

MeetingFailure publish_failure(KeyValueStore& store, const MeetingFailure& failure) {
  const std::string text = failure.encode();
  const MeetingFailure told = MeetingFailure::decode(text);  // in the words that the others read
  if (store.add(kTurnKey, 1) == 1) {
    store.set(kKey, text);
    return told;
  }
  const std::optional<std::string> first = store.wait_get(kKey, Deadline::after(kTextPatience));
  if (first) return MeetingFailure::decode(*first);
  // Who had the turn has died, or was no rank.
  store.set(kKey, text);
  return told;
}

void throw_failure(const std::string& where, const MeetingFailure& failure) {
  const std::string message = fmt::format("{}: {}", where, failure.cause);
  switch (failure.kind) {
    case MeetingFailure::Kind::Timeout:
      throw TimeoutError(message);
    case MeetingFailure::Kind::Network:
      throw NetworkError(message);
    case MeetingFailure::Kind::Peer:
      break;
  }
  throw PeerError(message, failure.rank, failure.pid);
}

}  // namespace libddp
