#pragma once

// The part of a bootstrap that joins ranks of different hosts by TCP connections. Used by
// bootstrap.cpp only.
//
// Every rank listens on one address of its host (network_interface.h), publishes it, connects to
// all lower ranks of other hosts (link_connector.h) and lets in the higher ones (link_acceptor.h);
// then both go on side by side, so that no order of ranks can block. Each pair gets a connection
// for control, one for messages and, if both are leaders of one number, some for collectives. The
// listener is closed when all have come. Thread rule: one thread.
//
//   LinkBootstrap(context, layout, peers).run();   // fills control and links of the remote peers

#include <map>
#include <string>
#include <vector>

#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/bootstrap_context.h"
#include "libddp/bootstrap/link_acceptor.h"
#include "libddp/bootstrap/link_address.h"
#include "libddp/bootstrap/link_connector.h"
#include "libddp/bootstrap/link_handshake.h"
#include "libddp/transport/host_layout.h"

namespace libddp {

class LinkBootstrap {
 public:
  LinkBootstrap(BootstrapContext& context, const HostLayout& layout, std::vector<GroupPeer>& peers);

  void run();

 private:
  LinkAcceptor open_acceptor();
  void publish_address(const LinkAddress& address);
  LinkAddress address_of(int rank);
  LinkProver make_prover() const;
  void connect_to(int lower_rank);
  void connect(LinkConnector& connector);
  void join(LinkAcceptor& acceptor);
  void wait(const LinkAcceptor& acceptor, bool is_open) const;
  void let_in(AdmittedLink admitted);
  /// True when the connection is made on both sides.
  bool advance(LinkConnector& connector);
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

  BootstrapContext& context_;
  const HostLayout& layout_;
  std::vector<GroupPeer>& peers_;
  const int rank_;
  const LinkProver prover_;
  LinkAddress own_address_;
  /// Addresses of the lower ranks of other hosts.
  std::map<int, LinkAddress> addresses_;
  std::vector<LinkConnector> connectors_;
};

}  // namespace libddp
