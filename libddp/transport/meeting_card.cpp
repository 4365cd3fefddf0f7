#include "libddp/transport/meeting_card.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "libddp/base/build_info.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/transport/key_value_store.h"

namespace libddp {
namespace {

constexpr const char* kFormat = "libddp-card-1";
constexpr std::size_t kNumFields = 11;

// One field per line, so a line end inside a field is written as two characters.
std::string escape(const std::string& field) {
  std::string text;
  for (char c : field) {
    if (c == '\\') {
      text += "\\\\";
    } else if (c == '\n') {
      text += "\\n";
    } else {
      text += c;
    }
  }
  return text;
}

std::string unescape(const std::string& text) {
  std::string field;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      field += text[++i] == 'n' ? '\n' : text[i];
    } else {
      field += text[i];
    }
  }
  return field;
}

[[noreturn]] void refuse(const std::string& text) {
  const std::string format = text.substr(0, std::min<std::size_t>(text.find('\n'), 32));
  if (format != kFormat && format.rfind("libddp-card-", 0) == 0) {
    throw StoreError(fmt::format(
        "libddp: the store holds no meeting card of this version: a rank's is '{}', libddp {} has "
        "'{}'. Hint: all ranks must run the same libddp version.",
        printable(format), version(), kFormat));
  }
  throw StoreError(fmt::format(
      "libddp: the store holds no meeting card but '{}'. Hint: all ranks must run the same libddp "
      "version and use a store of this run only.",
      printable(text.substr(0, 200))));
}

int to_int(const std::string& field, const std::string& text) {
  int number = 0;
  const char* end = field.data() + field.size();
  const auto [stop, error] = std::from_chars(field.data(), end, number);
  if (error != std::errc() || stop != end) refuse(text);
  return number;
}

}  // namespace

std::string MeetingCard::encode() const {
  std::string text = kFormat;
  for (const std::string& field :
       {std::to_string(rank), std::to_string(world_size), std::to_string(pid), host, boot_id,
        network_namespace, pid_namespace, socket_name, token, agreement, note}) {
    text += '\n';
    text += escape(field);
  }
  return text;
}

MeetingCard MeetingCard::decode(const std::string& text) {
  if (text.size() > kMaxValueBytes) refuse(text);
  std::vector<std::string> fields;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    fields.push_back(unescape(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  if (fields.size() != kNumFields + 1 || fields[0] != kFormat) refuse(text);
  MeetingCard card;
  card.rank = to_int(fields[1], text);
  card.world_size = to_int(fields[2], text);
  card.pid = to_int(fields[3], text);
  card.host = printable(fields[4]);
  card.boot_id = fields[5];
  card.network_namespace = fields[6];
  card.pid_namespace = fields[7];
  card.socket_name = fields[8];
  card.token = fields[9];
  card.agreement = fields[10];
  card.note = fields[11];
  return card;
}

std::string MeetingCard::who() const { return fmt::format("rank {} (pid {})", rank, pid); }

std::optional<MeetingFailure> find_disagreement(const MeetingCard& one, const MeetingCard& other) {
  using Kind = MeetingFailure::Kind;
  const MeetingCard& low = one.rank < other.rank ? one : other;
  const MeetingCard& high = one.rank < other.rank ? other : one;
  if (low.world_size != high.world_size) {
    return MeetingFailure{Kind::Peer, -1, 0,
                          fmt::format("{} has world size {}, {} has world size {}. Hint: start all "
                                      "ranks with one WORLD_SIZE.",
                                      low.who(), low.world_size, high.who(), high.world_size)};
  }
  if (low.agreement != high.agreement) {
    return MeetingFailure{
        Kind::Peer, -1, 0,
        fmt::format(
            "{} has '{}', {} has '{}'. Hint: all ranks must run the same libddp version with "
            "the same settings.",
            low.who(), printable(low.agreement), high.who(), printable(high.agreement))};
  }
  return std::nullopt;
}

}  // namespace libddp
