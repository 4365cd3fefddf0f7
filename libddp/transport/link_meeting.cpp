#include "libddp/transport/link_meeting.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/transport/network_interface.h"

namespace libddp {
namespace {

using Kind = MeetingFailure::Kind;

/// A connection of one rank's own network is there at once or never.
constexpr std::chrono::seconds kConnectPatience{15};
/// A connection that says nothing for so long is no rank.
constexpr std::chrono::seconds kStrangerPatience{10};
constexpr std::size_t kMaxStrangers = 256;
/// For collectives: one on which ranks give bytes to reduce, one on which they give results.
constexpr std::uint32_t kCollectiveLinks = 2;

struct LinkAnswer {
  std::uint32_t magic = 0;
  std::int32_t rank = -1;
  std::array<char, LinkHello::kTokenBytes> token{};
};

}  // namespace

LinkMeeting::LinkMeeting(MeetingContext& context, const HostLayout& layout,
                         std::vector<GroupPeer>& peers)
    : context_(context), layout_(layout), peers_(peers), rank_(context.options().rank) {}

void LinkMeeting::run() {
  open_listener();
  publish_card();
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (!layout_.is_local(rank, rank_)) peer(rank).collectives.resize(num_collective_links(rank));
  }
  for (int rank = 0; rank < rank_; ++rank) {
    if (!layout_.is_local(rank, rank_)) connect_to(rank);
  }
  accept_higher_ranks();
  for (int rank = 0; rank < rank_; ++rank) {
    if (!layout_.is_local(rank, rank_)) read_answers(rank);
  }
  for (GroupPeer& each : peers_) {
    if (!layout_.is_local(each.rank, rank_)) watch_liveness(each.control.get());
  }
}

void LinkMeeting::open_listener() {
  const NetworkInterface own = choose_interface(context_.options().route_to);
  try {
    listener_ = TcpListener::open(own.address);
  } catch (const NetworkError& error) {
    throw NetworkError(
        fmt::format("{}: cannot listen on {} ({}): {}. Hint: choose another interface with "
                    "LIBDDP_SOCKET_IFNAME.",
                    context_.where(), own.address, own.name, error.what()));
  }
  own_card_ = {listener_.endpoint(), own.name};
}

void LinkMeeting::publish_card() {
  context_.store().set(fmt::format("link/{}", rank_), own_card_.encode());
}

LinkCard LinkMeeting::card_of(int rank) {
  const std::string key = fmt::format("link/{}", rank);
  std::optional<std::string> text = context_.store().try_get(key);
  while (!text) {
    context_.look_around();
    text = context_.store().wait_get(key, Deadline::after(kInterruptPeriod));
  }
  return LinkCard::decode(*text);
}

std::uint32_t LinkMeeting::num_collective_links(int rank) const {
  const int index = layout_.index(rank_);
  return layout_.index(rank) == index && index < layout_.num_carriers() ? kCollectiveLinks : 0;
}

UniqueFd& LinkMeeting::place(int rank, LinkKind kind, std::uint32_t index) {
  GroupPeer& other = peer(rank);
  if (kind == LinkKind::Control) return other.control;
  if (kind == LinkKind::Messages) return other.messages;
  return other.collectives[index];
}

void LinkMeeting::connect_to(int lower_rank) {
  const LinkCard theirs = card_of(lower_rank);
  const auto connect = [&](LinkKind kind, std::uint32_t index) {
    place(lower_rank, kind, index) = connect_once(lower_rank, theirs, kind, index);
  };
  connect(LinkKind::Control, 0);
  connect(LinkKind::Messages, 0);
  for (std::uint32_t i = 0; i < num_collective_links(lower_rank); ++i) {
    connect(LinkKind::Collectives, i);
  }
  context_.reached(lower_rank);
}

UniqueFd LinkMeeting::connect_once(int rank, const LinkCard& theirs, LinkKind kind,
                                   std::uint32_t index) {
  const auto patience =
      std::chrono::ceil<std::chrono::milliseconds>(context_.deadline().remaining(kConnectPatience));
  const Deadline deadline = Deadline::after(patience);
  const LinkHello hello =
      LinkHello::make(rank_, kind, index, context_.card(rank_).token, context_.card(rank).token);
  try {
    UniqueFd socket = connect_tcp(theirs.endpoint, deadline);
    send_bytes(socket.get(), &hello, sizeof(hello), deadline);
    return socket;
  } catch (const NetworkError& error) {
    context_.look_around();  // a rank that failed has said so before it closed
    fail_unreachable(rank, theirs, error.what());
  } catch (const TimeoutError& error) {
    context_.look_around();
    fail_unreachable(rank, theirs,
                     fmt::format("connect: {} ({} ms)", error.what(), patience.count()));
  }
}

void LinkMeeting::fail_unreachable(int rank, const LinkCard& theirs, const std::string& reason) {
  const MeetingCard& mine = context_.card(rank_);
  const MeetingCard& other = context_.card(rank);
  context_.fail(
      {Kind::Network, rank, other.pid,
       fmt::format(
           "{} on {} (interface {}, {}) cannot reach {} on {} (interface {}) at {}: {}. "
           "Hint: both addresses must be of one network that no firewall closes; choose the "
           "interface with LIBDDP_SOCKET_IFNAME.",
           mine.who(), mine.host, own_card_.interface_name, own_card_.endpoint.address, other.who(),
           other.host, theirs.interface_name, theirs.endpoint.to_string(), reason)});
}

void LinkMeeting::accept_higher_ranks() {
  const int world_size = context_.options().world_size;
  const auto is_missing = [&] {
    for (int rank = rank_ + 1; rank < world_size; ++rank) {
      if (!layout_.is_local(rank, rank_) && !is_complete(rank)) return true;
    }
    return false;
  };
  Deadline next_look = Deadline::after(kInterruptPeriod);
  while (is_missing()) {
    wait_for_strangers();
    while (UniqueFd socket = listener_.accept()) {
      if (strangers_.size() == kMaxStrangers) strangers_.pop_front();
      strangers_.push_back({std::move(socket), Deadline::after(kStrangerPatience), {}, 0});
    }
    std::erase_if(strangers_, [this](Stranger& stranger) { return settle(stranger); });
    // A crowd of strangers must not keep this rank from seeing that the meeting has failed.
    if (!next_look.expired()) continue;
    context_.look_around();
    next_look = Deadline::after(kInterruptPeriod);
  }
  strangers_.clear();
  listener_ = TcpListener();
}

void LinkMeeting::wait_for_strangers() {
  std::vector<pollfd> entries{{listener_.fd(), POLLIN, 0}};
  for (const Stranger& stranger : strangers_) entries.push_back({stranger.socket.get(), POLLIN, 0});
  const int limit_ms = static_cast<int>(kInterruptPeriod.count());
  if (::poll(entries.data(), entries.size(), limit_ms) < 0 && errno != EINTR) {
    throw NetworkError(fmt::format("{}: cannot wait for connections", context_.where()));
  }
}

bool LinkMeeting::settle(Stranger& stranger) {
  auto* bytes = reinterpret_cast<char*>(&stranger.hello);
  const ssize_t got = ::recv(stranger.socket.get(), bytes + stranger.num_bytes,
                             sizeof(LinkHello) - stranger.num_bytes, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return stranger.patience.expired();
  if (got <= 0) return true;
  stranger.num_bytes += static_cast<std::size_t>(got);
  if (stranger.num_bytes < sizeof(LinkHello)) return stranger.patience.expired();
  if (!take(stranger)) {
    log(LogLevel::Warn, "link_refused", {{"group", context_.options().group_name}});
  }
  return true;
}

bool LinkMeeting::take(Stranger& stranger) {
  const LinkHello& hello = stranger.hello;
  if (!hello.is_ours() || hello.rank <= rank_ || hello.rank >= context_.options().world_size ||
      layout_.is_local(hello.rank, rank_) || hello.kind > LinkKind::Collectives) {
    return false;
  }
  const std::uint32_t limit =
      hello.kind == LinkKind::Collectives ? num_collective_links(hello.rank) : 1;
  if (hello.index >= limit) return false;
  const std::string& token = context_.card(hello.rank).token;
  if (!hello.shows(token, context_.card(rank_).token)) return false;
  UniqueFd& link = place(hello.rank, hello.kind, hello.index);
  if (link) return false;
  LinkAnswer answer;
  answer.magic = LinkHello::kMagic;
  answer.rank = rank_;
  std::copy(token.begin(), token.end(), answer.token.begin());
  try {
    send_bytes(stranger.socket.get(), &answer, sizeof(answer), context_.deadline());
  } catch (const NetworkError& error) {
    context_.fail_gone(context_.card(hello.rank), error.what());
  }
  link = std::move(stranger.socket);
  context_.reached(hello.rank);
  if (is_complete(hello.rank)) context_.linked(hello.rank);
  return true;
}

bool LinkMeeting::is_complete(int rank) const {
  const GroupPeer& other = peer(rank);
  return other.control && other.messages &&
         std::all_of(other.collectives.begin(), other.collectives.end(),
                     [](const UniqueFd& link) { return static_cast<bool>(link); });
}

void LinkMeeting::read_answers(int lower_rank) {
  const MeetingCard& other = context_.card(lower_rank);
  const auto read_one = [&](int socket) {
    pollfd polled{socket, POLLIN, 0};
    while (::poll(&polled, 1, static_cast<int>(kInterruptPeriod.count())) <= 0) {
      context_.look_around();
    }
    LinkAnswer answer;
    try {
      receive_bytes(socket, &answer, sizeof(answer), context_.deadline());
    } catch (const NetworkError& error) {
      context_.fail_gone(other, error.what());
    } catch (const TimeoutError&) {
      context_.fail_timeout();
    }
    const std::string token(answer.token.begin(), answer.token.end());
    if (answer.magic == LinkHello::kMagic && answer.rank == lower_rank &&
        token == context_.card(rank_).token) {
      return;
    }
    context_.fail({Kind::Network, lower_rank, other.pid,
                   fmt::format("whoever answers for {} on {} does not know this rank's token. "
                               "Hint: another program uses its address; start again.",
                               other.who(), other.host)});
  };
  read_one(peer(lower_rank).control.get());
  read_one(peer(lower_rank).messages.get());
  for (const UniqueFd& link : peer(lower_rank).collectives) read_one(link.get());
  context_.linked(lower_rank);
}

}  // namespace libddp
