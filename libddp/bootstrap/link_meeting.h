#pragma once

// The part of a meeting that joins ranks of different hosts by TCP connections. Used by meeting.cpp
// only.
//
// Every rank listens on one address of its host (network_interface.h), publishes it, connects to
// all lower ranks of other hosts (link_knock.h) and lets in the higher ones (link_door.h); then
// both go on side by side, so that no order of ranks can block. Each pair gets a connection for
// control, one for messages and, if both are leaders of one number, some for collectives. The
// listener is closed when all have come. Thread rule: one thread.
//
//   LinkMeeting(context, layout, peers).run();   // fills control and links of the remote peers

#include <map>
#include <string>
#include <vector>

#include "libddp/bootstrap/link_card.h"
#include "libddp/bootstrap/link_door.h"
#include "libddp/bootstrap/link_hello.h"
#include "libddp/bootstrap/link_knock.h"
#include "libddp/bootstrap/meeting.h"
#include "libddp/bootstrap/meeting_context.h"
#include "libddp/transport/host_layout.h"

namespace libddp {

class LinkMeeting {
 public:
  LinkMeeting(MeetingContext& context, const HostLayout& layout, std::vector<GroupPeer>& peers);

  void run();

 private:
  LinkDoor open_door();
  void publish_card(const LinkCard& card);
  LinkCard card_of(int rank);
  LinkProver make_prover() const;
  void knock_at(int lower_rank);
  void connect(LinkKnock& knock);
  void join(LinkDoor& door);
  void wait(const LinkDoor& door, bool is_open) const;
  void let_in(LinkGuest guest);
  /// True when the connection is made on both sides.
  bool advance(LinkKnock& knock);
  bool expects(const LinkPlace& place) const;
  bool is_missing_higher_ranks() const;
  bool is_complete(int rank) const;
  void completed(int rank);
  std::uint32_t num_collective_links(int rank) const;
  const UniqueFd& place(const LinkPlace& place) const;
  UniqueFd& place(const LinkPlace& place);
  [[noreturn]] void fail_unreachable(int rank, const std::string& reason);
  GroupPeer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const GroupPeer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  MeetingContext& context_;
  const HostLayout& layout_;
  std::vector<GroupPeer>& peers_;
  const int rank_;
  const LinkProver prover_;
  LinkCard own_card_;
  /// Cards of the lower ranks of other hosts.
  std::map<int, LinkCard> cards_;
  std::vector<LinkKnock> knocks_;
};

}  // namespace libddp
