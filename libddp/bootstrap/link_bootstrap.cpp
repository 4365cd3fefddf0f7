#include "libddp/bootstrap/link_bootstrap.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/transport/network_interface.h"

namespace libddp {
namespace {

using Kind = GroupFailure::Kind;

/// A connection of one rank's own network is there at once or never.
constexpr std::chrono::seconds kConnectPatience{15};
/// Kinds for collectives: those on which ranks give bytes to reduce, those for results.
constexpr std::uint32_t kCollectiveLinks = 2;

}  // namespace

LinkBootstrap::LinkBootstrap(BootstrapContext& context, const HostLayout& layout,
                             std::vector<GroupPeer>& peers)
    : context_(context),
      layout_(layout),
      peers_(peers),
      rank_(context.options().rank),
      prover_(make_prover()) {}

void LinkBootstrap::run() {
  LinkAcceptor acceptor = open_acceptor();
  publish_address(own_address_);
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (!layout_.is_local(rank, rank_)) peer(rank).collectives.resize(num_collective_links(rank));
  }
  for (int rank = 0; rank < rank_; ++rank) {
    if (!layout_.is_local(rank, rank_)) connect_to(rank);
  }
  join(acceptor);
  for (GroupPeer& each : peers_) {
    if (layout_.is_local(each.rank, rank_)) continue;
    watch_liveness(each.control.get());
    keep_alive(each.messages.get());
    for (const UniqueFd& link : each.collectives) keep_alive(link.get());
  }
}

LinkProver LinkBootstrap::make_prover() const {
  const auto session = context_.session() ? context_.session()->key() : nullptr;
  return LinkProver(session, [this](int rank) { return context_.info(rank).token; });
}

LinkAcceptor LinkBootstrap::open_acceptor() {
  // Hosts that are only names, in tests, are one machine.
  const BootstrapOptions& options = context_.options();
  const NetworkInterface own =
      choose_interface(options.route_to, context_.deadline(), !options.host_identity.empty());
  try {
    TcpListener listener = TcpListener::open(own.address);
    own_address_ = {listener.endpoint(), own.name};
    return LinkAcceptor(std::move(listener), rank_, prover_,
                        [this](const LinkPlace& place) { return expects(place); });
  } catch (const NetworkError& error) {
    throw NetworkError(
        fmt::format("{}: cannot listen on {} ({}): {}. Hint: choose another interface with "
                    "LIBDDP_SOCKET_IFNAME.",
                    context_.where(), own.address, own.name, error.what()));
  }
}

void LinkBootstrap::publish_address(const LinkAddress& address) {
  context_.entries().set(fmt::format("link/{}", rank_), address.encode());
}

LinkAddress LinkBootstrap::address_of(int rank) {
  const std::string key = fmt::format("link/{}", rank);
  std::optional<std::string> text = context_.entries().try_get(key);
  while (!text) {
    context_.look_around();
    text = context_.entries().wait_get(key, Deadline::after(kInterruptPeriod));
  }
  return LinkAddress::decode(*text);
}

std::uint32_t LinkBootstrap::num_collective_links(int rank) const {
  const int index = layout_.index(rank_);
  if (layout_.index(rank) != index || index >= layout_.num_leaders()) return 0;
  return kCollectiveLinks * static_cast<std::uint32_t>(context_.options().sockets_per_link);
}

const UniqueFd& LinkBootstrap::place(const LinkPlace& place) const {
  const GroupPeer& other = peer(place.rank);
  if (place.kind == LinkKind::Control) return other.control;
  if (place.kind == LinkKind::Messages) return other.messages;
  return other.collectives[place.index];
}

UniqueFd& LinkBootstrap::place(const LinkPlace& place) {
  return const_cast<UniqueFd&>(std::as_const(*this).place(place));
}

void LinkBootstrap::connect_to(int lower_rank) {
  addresses_[lower_rank] = address_of(lower_rank);
  const auto connector = [&](LinkKind kind, std::uint32_t index) {
    connectors_.emplace_back(LinkPlace{lower_rank, kind, index}, rank_,
                             addresses_[lower_rank].endpoint);
    connect(connectors_.back());
  };
  connector(LinkKind::Control, 0);
  connector(LinkKind::Messages, 0);
  for (std::uint32_t i = 0; i < num_collective_links(lower_rank); ++i) {
    connector(LinkKind::Collectives, i);
  }
}

void LinkBootstrap::connect(LinkConnector& connector) {
  const auto patience =
      std::chrono::ceil<std::chrono::milliseconds>(context_.deadline().remaining(kConnectPatience));
  const int rank = connector.place().rank;
  std::string reason;
  try {
    return connector.connect(Deadline::after(patience));
  } catch (const NetworkError& error) {
    reason = error.what();
  } catch (const TimeoutError& error) {
    reason = fmt::format("connect: {} ({} ms)", error.what(), patience.count());
  }
  context_.look_around();  // a rank that failed has said so before it closed
  if (connector.was_dropped()) context_.fail_gone(context_.info(rank), reason);
  fail_unreachable(rank, reason);
}

void LinkBootstrap::fail_unreachable(int rank, const std::string& reason) {
  const LinkAddress& theirs = addresses_[rank];
  const PeerInfo& mine = context_.info(rank_);
  const PeerInfo& other = context_.info(rank);
  context_.fail(
      {Kind::Network,
       fmt::format(
           "{} on {} (interface {}, {}) cannot reach {} on {} (interface {}) at {}: {}. "
           "Hint: both addresses must be of one network that no firewall closes; choose the "
           "interface with LIBDDP_SOCKET_IFNAME.",
           mine.who(), mine.host, own_address_.interface_name, own_address_.endpoint.address,
           other.who(), other.host, theirs.interface_name, theirs.endpoint.to_string(), reason),
       rank, other.pid});
}

void LinkBootstrap::join(LinkAcceptor& acceptor) {
  Deadline next_look = Deadline::after(kInterruptPeriod);
  while (true) {
    std::erase_if(connectors_, [this](LinkConnector& connector) { return advance(connector); });
    const bool is_open = is_missing_higher_ranks();
    if (!is_open && connectors_.empty()) return;
    wait(acceptor, is_open);
    if (is_open) {
      for (AdmittedLink& admitted : acceptor.admit()) let_in(std::move(admitted));
    }
    // A crowd of strangers must not keep this rank from seeing that the bootstrap has failed.
    if (!next_look.expired()) continue;
    context_.look_around();
    next_look = Deadline::after(kInterruptPeriod);
  }
}

void LinkBootstrap::wait(const LinkAcceptor& acceptor, bool is_open) const {
  std::vector<pollfd> entries;
  if (is_open) acceptor.add_polls(entries);
  for (const LinkConnector& connector : connectors_)
    entries.push_back({connector.socket(), POLLIN, 0});
  // Short enough for who was dropped by a crowd, and for an acceptor without descriptors.
  constexpr int kWaitMs = 20;
  if (::poll(entries.data(), entries.size(), kWaitMs) < 0 && errno != EINTR) {
    throw NetworkError(fmt::format("{}: cannot wait for connections", context_.where()));
  }
}

bool LinkBootstrap::advance(LinkConnector& connector) {
  const int rank = connector.place().rank;
  if (connector.wants_to_connect()) connect(connector);
  bool is_done = false;
  try {
    is_done = connector.advance(prover_);
  } catch (const NetworkError& error) {
    context_.look_around();
    const PeerInfo& other = context_.info(rank);
    context_.fail(
        {Kind::Network,
         fmt::format("{} on {} at {}: {}. Hint: start all ranks anew, with one libddp "
                     "version and one run key; another program may use its address.",
                     other.who(), other.host, addresses_[rank].endpoint.to_string(), error.what()),
         rank, other.pid});
  }
  // The other side cannot finish without this rank's proof, but may at any time after it.
  if (connector.has_proved()) context_.reached(rank);
  if (!is_done) return false;
  place(connector.place()) = connector.take();
  completed(rank);
  return true;
}

bool LinkBootstrap::expects(const LinkPlace& wanted) const {
  const int rank = wanted.rank;
  if (rank <= rank_ || rank >= context_.options().world_size || layout_.is_local(rank, rank_) ||
      wanted.kind > LinkKind::Collectives) {
    return false;
  }
  const bool is_collective = wanted.kind == LinkKind::Collectives;
  const std::uint32_t limit = is_collective ? num_collective_links(rank) : 1;
  return wanted.index < limit && !place(wanted);
}

void LinkBootstrap::let_in(AdmittedLink admitted) {
  if (!expects(admitted.place)) return;  // the same one twice at once
  place(admitted.place) = std::move(admitted.socket);
  context_.reached(admitted.place.rank);
  completed(admitted.place.rank);
}

bool LinkBootstrap::is_missing_higher_ranks() const {
  for (int rank = rank_ + 1; rank < context_.options().world_size; ++rank) {
    if (!layout_.is_local(rank, rank_) && !is_complete(rank)) return true;
  }
  return false;
}

bool LinkBootstrap::is_complete(int rank) const {
  const GroupPeer& other = peer(rank);
  return other.control && other.messages &&
         std::all_of(other.collectives.begin(), other.collectives.end(),
                     [](const UniqueFd& link) { return static_cast<bool>(link); });
}

void LinkBootstrap::completed(int rank) {
  if (is_complete(rank)) context_.linked(rank);
}

}  // namespace libddp
