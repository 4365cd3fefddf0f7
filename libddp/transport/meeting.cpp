#include "libddp/transport/meeting.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <sstream>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/transport/host_layout.h"
#include "libddp/transport/link_meeting.h"
#include "libddp/transport/meeting_card.h"
#include "libddp/transport/meeting_context.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {
namespace {

using Kind = MeetingFailure::Kind;

// A connection that says nothing for so long is no rank. Generous: a stopped process is one.
constexpr std::chrono::seconds kHelloPatience{30};
// For the first claimant's card, to name its pid.
constexpr std::chrono::seconds kClaimantPatience{10};
constexpr FrameLimits kLimits{.max_bytes = 1024, .max_descriptors = 64};

// NOTE [Meeting]
// 1. Every rank listens, claims its number and publishes its card.
// 2. It reads all cards and compares.
// 3. It connects to all lower ranks, says hello and passes its descriptors. A listening socket
//    queues connections, so nobody waits for anybody here.
// 4. It accepts all higher ranks and answers each with its own descriptors.
// 5. It reads the answers of the lower ranks.
// Step 4 of a rank needs only step 3 of others, step 5 only step 4 of lower ones: no cycle.
// This is between the ranks of a host. With several hosts, link_meeting.h then does the same
// between ranks of different hosts.
class Meeting {
 public:
  Meeting(KeyValueStore& store, const MeetingOptions& options, const std::vector<int>& descriptors,
          Deadline deadline)
      : context_(store, options, deadline), rank_(options.rank), descriptors_(descriptors) {}

  std::vector<GroupPeer> run();

 private:
  void hold();
  void publish_card();
  void collect_cards();
  void find_hosts();
  bool is_local(int rank) const { return layout_.is_local(rank, rank_); }
  bool expects_local_ranks() const;
  void connect_to(int lower_rank);
  void take_hello(UniqueFd connection);
  void read_answer(int lower_rank);
  template <typename Call>
  auto talk_to(int other_rank, Call call);
  GroupPeer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  MeetingContext context_;
  const int rank_;
  const std::vector<int>& descriptors_;
  UnixListener listener_;
  HostLayout layout_;
  std::vector<GroupPeer> peers_;
};

std::vector<GroupPeer> Meeting::run() {
  // Whatever goes wrong is told to the others before the listener closes.
  try {
    hold();
  } catch (const std::exception& error) {
    context_.announce(error.what());
    throw;
  } catch (...) {
    context_.announce("it was interrupted");
    throw;
  }
  return std::move(peers_);
}

void Meeting::hold() {
  const int world_size = context_.options().world_size;
  context_.open();
  peers_.resize(static_cast<std::size_t>(world_size));
  listener_ = UnixListener::open();
  publish_card();
  collect_cards();
  find_hosts();
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_local(rank)) connect_to(rank);
  }
  while (expects_local_ranks()) {
    UniqueFd connection = listener_.accept(kInterruptPeriod);
    if (connection) {
      take_hello(std::move(connection));
    } else {
      context_.look_around();
    }
  }
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_local(rank)) read_answer(rank);
  }
  for (GroupPeer& each : peers_) {
    if (each.control) each.pidfd = peer_pidfd(each.control.get());
  }
  if (layout_.num_hosts() > 1) LinkMeeting(context_, layout_, peers_).run();
}

void Meeting::find_hosts() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    keys.push_back(context_.card(rank).host_key());
  }
  layout_ = HostLayout::from_keys(keys);
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    const MeetingCard& card = context_.card(rank);
    peer(rank).rank = rank;
    peer(rank).pid = card.pid;
    peer(rank).host = card.host;
    peer(rank).note = card.note;
    peer(rank).host_index = layout_.host(rank);
  }
}

bool Meeting::expects_local_ranks() const {
  const std::vector<int>& local = layout_.ranks_of(layout_.host(rank_));
  return std::any_of(local.begin(), local.end(),
                     [this](int rank) { return rank > rank_ && !context_.is_linked(rank); });
}

void Meeting::publish_card() {
  MeetingCard mine;
  mine.rank = rank_;
  mine.world_size = context_.options().world_size;
  mine.pid = ::getpid();
  mine.host = host_name();
  mine.boot_id = boot_id();
  mine.network_namespace = network_namespace();
  if (!context_.options().host_identity.empty()) {
    mine.network_namespace = context_.options().host_identity;
  }
  mine.pid_namespace = pid_namespace();
  mine.socket_name = listener_.name();
  mine.token = random_hex(16);
  mine.agreement = context_.options().agreement;
  mine.note = context_.options().note;

  const std::string key = fmt::format("card/{}", rank_);
  if (context_.store().add(fmt::format("claim/{}", rank_), 1) == 1) {
    context_.store().set(key, mine.encode());
    context_.learn(std::move(mine));
    return;
  }
  const auto first = context_.store().wait_get(key, Deadline::after(kClaimantPatience));
  const pid_t other = first ? MeetingCard::decode(*first).pid : 0;
  context_.fail({Kind::Peer, rank_, other,
                 fmt::format("two processes call themselves rank {}: pid {} and pid {}. Hint: give "
                             "every process its own RANK, and every run a fresh store.",
                             rank_, other == 0 ? "unknown" : std::to_string(other), mine.pid)});
}

void Meeting::collect_cards() {
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    if (rank == rank_) continue;
    const std::string key = fmt::format("card/{}", rank);
    std::optional<std::string> text = context_.store().try_get(key);
    while (!text) {
      context_.look_around();
      text = context_.store().wait_get(key, Deadline::after(kInterruptPeriod));
    }
    MeetingCard card = MeetingCard::decode(*text);
    if (card.rank != rank) {
      throw StoreError(fmt::format("{}: the store's card of rank {} is that of {}.",
                                   context_.where(), rank, card.who()));
    }
    if (const auto failure = find_disagreement(context_.card(rank_), card)) {
      context_.fail(*failure);
    }
    context_.learn(std::move(card));
  }
}

// Turns the sockets' errors into failures of the meeting. REQUIRES: `call` only moves bytes.
template <typename Call>
auto Meeting::talk_to(int other_rank, Call call) {
  try {
    return call();
  } catch (const NetworkError& error) {
    context_.fail_gone(context_.card(other_rank), error.what());
  } catch (const TimeoutError&) {
    context_.fail_timeout();
  }
}

void Meeting::connect_to(int lower_rank) {
  const MeetingCard& theirs = context_.card(lower_rank);
  UniqueFd control =
      talk_to(lower_rank, [&] { return connect_unix(theirs.socket_name, context_.deadline()); });
  const uid_t uid = peer_credentials(control.get()).uid;
  if (uid != ::geteuid()) {
    context_.fail(
        {Kind::Network, lower_rank, theirs.pid,
         fmt::format("{} runs as user {}, {} as user {}. Hint: start all ranks as one user.",
                     theirs.who(), uid, context_.card(rank_).who(), ::geteuid())});
  }
  const std::string hello =
      fmt::format("{} {} {}", rank_, context_.card(rank_).token, theirs.token);
  talk_to(lower_rank, [&] { send_frame(control.get(), hello, descriptors_, context_.deadline()); });
  // It cannot finish without this hello, but may finish at any time after it.
  context_.reached(lower_rank);
  peer(lower_rank).control = std::move(control);
}

void Meeting::take_hello(UniqueFd connection) {
  // Only a process of this user that has read both cards is let in. Anyone else is no reason to
  // fail: the ranks that are missing still come.
  const auto refuse = [](const std::string& reason) {
    log(LogLevel::Warn, "meeting_connection_refused", {{"reason", reason}});
  };
  const PeerCredentials credentials = peer_credentials(connection.get());
  if (credentials.uid != ::geteuid()) return refuse(fmt::format("user {}", credentials.uid));
  const Deadline patience = Deadline::after(kHelloPatience);
  while (!wait_readable(connection.get(), kInterruptPeriod)) {
    context_.look_around();
    if (patience.expired()) return refuse("silence");
  }
  Frame frame;
  try {
    frame = receive_frame(connection.get(), kLimits, Deadline::after(kHelloPatience));
  } catch (const NetworkError& error) {
    return refuse(error.what());
  } catch (const TimeoutError& error) {
    return refuse(error.what());
  }
  int rank = -1;
  std::string their_token;
  std::string own_token;
  std::istringstream(frame.bytes) >> rank >> their_token >> own_token;
  if (rank <= rank_ || rank >= context_.options().world_size || !is_local(rank) ||
      context_.is_linked(rank) || their_token != context_.card(rank).token ||
      own_token != context_.card(rank_).token) {
    return refuse("wrong rank or token");
  }
  talk_to(rank, [&] {
    send_frame(connection.get(), context_.card(rank_).token, descriptors_, context_.deadline());
  });
  context_.reached(rank);
  context_.linked(rank);
  peer(rank).control = std::move(connection);
  peer(rank).descriptors = std::move(frame.descriptors);
}

void Meeting::read_answer(int lower_rank) {
  const int socket = peer(lower_rank).control.get();
  while (!wait_readable(socket, kInterruptPeriod)) context_.look_around();
  Frame frame =
      talk_to(lower_rank, [&] { return receive_frame(socket, kLimits, context_.deadline()); });
  if (frame.bytes != context_.card(lower_rank).token) {
    context_.fail({Kind::Network, lower_rank, context_.card(lower_rank).pid,
                   fmt::format("whoever answers for {} does not know its token. Hint: another "
                               "program uses its socket; start again.",
                               context_.card(lower_rank).who())});
  }
  context_.linked(lower_rank);
  peer(lower_rank).descriptors = std::move(frame.descriptors);
}

}  // namespace

std::vector<GroupPeer> meet(KeyValueStore& store, const MeetingOptions& options,
                            const std::vector<int>& descriptors, Deadline deadline) {
  return Meeting(store, options, descriptors, deadline).run();
}

}  // namespace libddp
