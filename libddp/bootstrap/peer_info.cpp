#include "libddp/bootstrap/peer_info.h"

#include <fmt/format.h>

#include "libddp/base/printable.h"
#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr RecordForm kPeerForm{"libddp-peer-2", "the store holds no description of a rank"};

}  // namespace

std::string PeerInfo::encode() const {
  RecordWriter fields(kPeerForm);
  fields.integer(rank).integer(world_size).integer(pid);
  for (const std::string& each :
       {host, boot_id, network_namespace, pid_namespace, socket_name, token, agreement, note}) {
    fields.field(each);
  }
  return fields.text();
}

PeerInfo PeerInfo::decode(const std::string& text) {
  RecordReader fields(kPeerForm, text);
  PeerInfo info;
  info.rank = fields.integer(0);
  info.world_size = fields.integer(0);
  info.pid = fields.integer(0);
  info.host = printable(fields.field());
  for (std::string* each : {&info.boot_id, &info.network_namespace, &info.pid_namespace,
                            &info.socket_name, &info.token, &info.agreement, &info.note}) {
    *each = fields.field();
  }
  fields.end();
  return info;
}

std::string PeerInfo::who() const { return fmt::format("rank {} (pid {})", rank, pid); }

std::optional<GroupFailure> find_disagreement(const PeerInfo& one, const PeerInfo& other) {
  using Kind = GroupFailure::Kind;
  const PeerInfo& low = one.rank < other.rank ? one : other;
  const PeerInfo& high = one.rank < other.rank ? other : one;
  if (low.world_size != high.world_size) {
    return GroupFailure{Kind::Peer,
                        fmt::format("{} has world size {}, {} has world size {}. Hint: start all "
                                    "ranks with one WORLD_SIZE.",
                                    low.who(), low.world_size, high.who(), high.world_size),
                        -1, 0};
  }
  if (low.agreement != high.agreement) {
    return GroupFailure{
        Kind::Peer,
        fmt::format(
            "{} has '{}', {} has '{}'. Hint: all ranks must run the same libddp version with "
            "the same settings.",
            low.who(), printable(low.agreement), high.who(), printable(high.agreement)),
        -1, 0};
  }
  return std::nullopt;
}

}  // namespace libddp
