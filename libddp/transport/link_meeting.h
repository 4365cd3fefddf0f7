#pragma once

// The part of a meeting that joins ranks of different hosts by TCP connections. Used by meeting.cpp
// only.
//
// Every rank listens on one address of its host (network_interface.h), publishes it, connects to
// all lower ranks of other hosts and accepts the higher ones. Each pair gets a connection for
// control, one for messages and, if both are carriers of one number, two for collectives. The
// listener is closed when all have come. Whoever connects without the right hello within seconds is
// dropped and does no harm.
// Thread rule: one thread.
//
//   LinkMeeting(context, layout, peers).run();   // fills control and links of the remote peers

#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "libddp/transport/host_layout.h"
#include "libddp/transport/link_card.h"
#include "libddp/transport/link_hello.h"
#include "libddp/transport/meeting.h"
#include "libddp/transport/meeting_context.h"

namespace libddp {

class LinkMeeting {
 public:
  LinkMeeting(MeetingContext& context, const HostLayout& layout, std::vector<GroupPeer>& peers);

  void run();

 private:
  /// A connection whose hello has not come yet.
  struct Stranger {
    UniqueFd socket;
    Deadline patience = Deadline::never();
    LinkHello hello;
    std::size_t num_bytes = 0;
  };

  void open_listener();
  void publish_card();
  LinkCard card_of(int rank);
  void connect_to(int lower_rank);
  UniqueFd connect_once(int rank, const LinkCard& theirs, LinkKind kind, std::uint32_t index);
  void accept_higher_ranks();
  void wait_for_strangers();
  /// True when `stranger` needs no more waiting: taken or refused.
  bool settle(Stranger& stranger);
  bool take(Stranger& stranger);
  void read_answers(int lower_rank);
  bool is_complete(int rank) const;
  std::uint32_t num_collective_links(int rank) const;
  UniqueFd& place(int rank, LinkKind kind, std::uint32_t index);
  [[noreturn]] void fail_unreachable(int rank, const LinkCard& theirs, const std::string& reason);
  GroupPeer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const GroupPeer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  MeetingContext& context_;
  const HostLayout& layout_;
  std::vector<GroupPeer>& peers_;
  const int rank_;
  TcpListener listener_;
  LinkCard own_card_;
  std::deque<Stranger> strangers_;
};

}  // namespace libddp
