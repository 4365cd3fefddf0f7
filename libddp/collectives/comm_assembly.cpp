#include "libddp/collectives/comm_assembly.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/collectives/hierarchical_comm.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/memory/child_mappings.h"
#include "libddp/transport/host_layout.h"

namespace libddp {
namespace {

/// What each rank passes to those of its host, in this order.
enum Descriptor : std::size_t { kPage, kArena, kNumDescriptors };

ShmMember make_member(const CommAssembly& own, GroupPeer& peer, std::size_t world_size) {
  if (peer.descriptors.size() != kNumDescriptors) {
    throw PeerError(
        fmt::format("libddp[group {}, rank {}/{}]: rank {} passed {} descriptors instead of {}. "
                    "Hint: all ranks must run one version of libddp.",
                    own.group_name, own.rank, world_size, peer.rank, peer.descriptors.size(),
                    static_cast<std::size_t>(kNumDescriptors)),
        peer.rank, peer.pid);
  }
  ShmMember member;
  member.page = SharedSegment::map(std::move(peer.descriptors[kPage]));
  member.arena = SharedSegment::map(std::move(peer.descriptors[kArena]));
  make_private_in_children(member.arena);
  return member;
}

HostLayout layout_of(const std::vector<GroupPeer>& peers) {
  std::vector<std::string> keys;
  for (const GroupPeer& peer : peers) keys.push_back(std::to_string(peer.host_index));
  return HostLayout::from_keys(keys);
}

std::unique_ptr<ShmComm> assemble_host(CommAssembly& own, std::vector<GroupPeer>& peers,
                                       const HostLayout& layout) {
  const std::vector<int>& ranks = layout.ranks_of(layout.host(own.rank));
  ShmCommOptions options;
  options.rank = layout.index(own.rank);
  options.world_size = static_cast<int>(ranks.size());
  options.group_size = static_cast<int>(peers.size());
  options.group_name = own.group_name;
  options.arena = own.arena;
  for (const int rank : ranks) {
    GroupPeer& peer = peers[static_cast<std::size_t>(rank)];
    ShmMember member;
    if (rank == own.rank) {
      member.page = std::move(own.page);
    } else {
      member = make_member(own, peer, peers.size());
    }
    member.group_rank = rank;
    member.pid = peer.pid;
    member.host = peer.host;
    member.cpu_mask = peer.note;
    options.members.push_back(std::move(member));
  }
  return std::make_unique<ShmComm>(std::move(options));
}

void add_leaders(HierarchicalCommOptions& options, std::vector<GroupPeer>& peers) {
  const int index = options.layout.index(options.rank);
  if (index >= options.layout.num_leaders()) return;
  for (int host = 0; host < options.layout.num_hosts(); ++host) {
    if (host == options.layout.host(options.rank)) continue;
    const int rank = options.layout.ranks_of(host)[static_cast<std::size_t>(index)];
    GroupPeer& peer = peers[static_cast<std::size_t>(rank)];
    LinkPeer leader;
    leader.host = host;
    leader.rank = rank;
    leader.pid = peer.pid;
    leader.host_name = peer.host;
    // The first half gives, the second brings results.
    const std::size_t half = peer.collectives.size() / 2;
    for (std::size_t i = 0; i < peer.collectives.size(); ++i) {
      (i < half ? leader.give : leader.result).push_back(std::move(peer.collectives[i]));
    }
    options.leaders.push_back(std::move(leader));
  }
}

}  // namespace

std::vector<int> descriptors_of(const SharedSegment& page, const Arena& arena) {
  return {page.fd(), arena.segment().fd()};
}

std::unique_ptr<Comm> assemble_comm(CommAssembly own, std::vector<GroupPeer>& peers) {
  HostLayout layout = layout_of(peers);
  std::unique_ptr<ShmComm> local = assemble_host(own, peers, layout);
  if (layout.num_hosts() == 1) return local;
  if (own.make_stage && own.link.wire_dtype != Dtype::Float32) {
    throw ArgumentError(
        fmt::format("libddp[group {}, rank {}/{}]: wire_dtype={} is for libddp's own links, but "
                    "another engine moves the bytes between hosts. Hint: pass float32 (or unset "
                    "LIBDDP_WIRE_DTYPE), or leave the other engine out.",
                    own.group_name, own.rank, peers.size(), name(own.link.wire_dtype)));
  }
  HierarchicalCommOptions options;
  options.rank = own.rank;
  options.layout = std::move(layout);
  options.arena = std::move(own.arena);
  options.local = std::move(local);
  options.link = own.link;
  options.make_stage = std::move(own.make_stage);
  add_leaders(options, peers);
  for (GroupPeer& peer : peers) {
    if (options.layout.is_local(peer.rank, own.rank)) continue;
    options.message_peers.push_back({peer.rank, peer.pid, peer.host, std::move(peer.messages)});
  }
  return std::make_unique<HierarchicalComm>(std::move(options));
}

}  // namespace libddp
