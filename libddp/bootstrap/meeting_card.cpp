#include "libddp/bootstrap/meeting_card.h"

#include <fmt/format.h>

#include "libddp/base/printable.h"
#include "libddp/bootstrap/meeting_text.h"

namespace libddp {
namespace {

constexpr MeetingTextForm kCardForm{"libddp-card-2", "the store holds no meeting card"};

}  // namespace

std::string MeetingCard::encode() const {
  MeetingTextWriter fields(kCardForm);
  fields.integer(rank).integer(world_size).integer(pid);
  for (const std::string& each :
       {host, boot_id, network_namespace, pid_namespace, socket_name, token, agreement, note}) {
    fields.field(each);
  }
  return fields.text();
}

MeetingCard MeetingCard::decode(const std::string& text) {
  MeetingTextReader fields(kCardForm, text);
  MeetingCard card;
  card.rank = fields.integer(0);
  card.world_size = fields.integer(0);
  card.pid = fields.integer(0);
  card.host = printable(fields.field());
  for (std::string* each : {&card.boot_id, &card.network_namespace, &card.pid_namespace,
                            &card.socket_name, &card.token, &card.agreement, &card.note}) {
    *each = fields.field();
  }
  fields.end();
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
