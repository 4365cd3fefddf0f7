#include "libddp/bootstrap/meeting.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <utility>

#include "libddp/base/backoff.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/bootstrap/link_meeting.h"
#include "libddp/bootstrap/meeting_card.h"
#include "libddp/bootstrap/meeting_context.h"
#include "libddp/bootstrap/meeting_hello.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/bootstrap/unix_door.h"
#include "libddp/transport/host_layout.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {
namespace {

using Kind = MeetingFailure::Kind;

// For the first claimant's card, to name its pid.
constexpr std::chrono::seconds kClaimantPatience{10};
// With a key a counter that was not 0 may also be the work of a stranger.
constexpr std::chrono::seconds kSealedClaimantPatience{2};
// So long ranks that were started together are waited for before any is looked at by itself.
constexpr std::chrono::milliseconds kStartTogether{100};

std::string card_key(int rank) { return fmt::format("card/{}", rank); }

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
  void claim_rank();
  void open_session(MeetingSession& session);
  void publish_card();
  void collect_cards();
  void check_has_no_key(int rank);
  void do_without_key();
  bool take_cards(const std::vector<int>& ranks);
  void take_card(int rank, const std::string& text);
  void find_hosts();
  bool is_local(int rank) const { return layout_.is_local(rank, rank_); }
  bool expects_local_ranks() const;
  void connect_to(int lower_rank);
  void take_hello(UnixGuest& guest);
  void read_answer(int lower_rank);
  template <typename Call>
  auto talk_to(int other_rank, Call call);
  GroupPeer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  MeetingContext context_;
  const int rank_;
  const std::vector<int>& descriptors_;
  UnixDoor door_;
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
  claim_rank();
  if (MeetingSession* session = context_.session()) open_session(*session);
  publish_card();
  collect_cards();
  find_hosts();
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_local(rank)) connect_to(rank);
  }
  Deadline next_look = Deadline::after(kInterruptPeriod);
  while (expects_local_ranks()) {
    for (UnixGuest& guest : door_.admit(kInterruptPeriod)) take_hello(guest);
    if (!next_look.expired()) continue;
    context_.look_around();
    next_look = Deadline::after(kInterruptPeriod);
  }
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_local(rank)) read_answer(rank);
  }
  for (GroupPeer& each : peers_) {
    if (each.control) each.pidfd = peer_pidfd(each.control.get());
  }
  if (layout_.num_hosts() > 1 && !context_.options().key) do_without_key();
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

void Meeting::do_without_key() {
  constexpr const char* kHint =
      "Hint: give every host the same secret file of 32 bytes or more (LIBDDP_RUN_KEY_FILE, or "
      "'libddp run --run-key-file'; docs/security.md).";
  if (context_.options().require_key) {
    throw ArgumentError(fmt::format(
        "{}: the ranks are on {} hosts and there is no run key, which require_key demands. {}",
        context_.where(), layout_.num_hosts(), kHint));
  }
  // Once per run: the first group has rank 0 of the run at its rank 0.
  static std::atomic<bool> is_first_group{true};
  if (!is_first_group.exchange(false) || rank_ != 0) return;
  log(LogLevel::Warn, "no_run_key",
      {{"group", context_.options().group_name},
       {"num_hosts", layout_.num_hosts()},
       {"reason", "whoever can reach the store can join this run or disturb its start"},
       {"hint", kHint}});
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
  mine.boot_id = machine_id();
  mine.network_namespace = network_namespace();
  if (!context_.options().host_identity.empty()) {
    mine.network_namespace = context_.options().host_identity;
  }
  mine.pid_namespace = pid_namespace();
  mine.socket_name = door_.name();
  mine.token = random_hex(16);
  mine.agreement = context_.options().agreement;
  mine.note = context_.options().note;

  context_.entries().set(card_key(rank_), mine.encode());
  context_.learn(std::move(mine));
}

void Meeting::claim_rank() {
  if (context_.store().add(fmt::format("claim/{}", rank_), 1) == 1) return;
  pid_t other = 0;
  if (MeetingSession* session = context_.session()) {
    const auto hail = session->find_other_claimant(Deadline::after(kSealedClaimantPatience));
    if (!hail) return;  // a stranger has counted
    other = hail->pid;
  } else {
    const auto card =
        context_.store().wait_get(card_key(rank_), Deadline::after(kClaimantPatience));
    if (card) other = MeetingCard::decode(*card).pid;
  }
  context_.fail(
      {Kind::Peer, rank_, other,
       fmt::format("two processes call themselves rank {}: pid {} and pid {}. Hint: give every "
                   "process its own RANK, and every run a fresh store.",
                   rank_, other == 0 ? "unknown" : std::to_string(other), ::getpid())});
}

// NOTE [Session], in meeting_session.h.
void Meeting::open_session(MeetingSession& session) {
  session.publish();
  const Deadline together = Deadline::after(kStartTogether);
  Backoff backoff(kStartTogether);
  while (!session.try_all_hails() && !together.expired()) {
    context_.look_around();
    backoff.pause(together);
  }
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    const Hail* hail = session.try_hail(rank);
    while (hail == nullptr) {
      context_.look_around();
      hail = session.try_hail(rank);
    }
    // The cards come too late for this: ranks that expect others than these do not get there.
    const auto in_short = [](const Hail& of) {
      MeetingCard card;
      card.rank = of.rank;
      card.world_size = of.world_size;
      card.pid = of.pid;
      return card;
    };
    const auto failure = find_disagreement(in_short(session.own()), in_short(*hail));
    if (failure) context_.fail(*failure);
  }
  session.open();
}

// Ranks that start together are read in one request. Once somebody is late the others are looked at
// one by one: a disagreement shows without waiting for the last.
void Meeting::collect_cards() {
  std::vector<int> missing;
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    if (rank != rank_) missing.push_back(rank);
  }
  const Deadline together = Deadline::after(kStartTogether);
  Backoff backoff(kStartTogether);
  while (!take_cards(missing)) {
    context_.look_around();
    if (!together.expired()) {
      backoff.pause(together);
      continue;
    }
    const int rank = missing.front();
    if (!context_.session()) check_has_no_key(rank);
    const auto text =
        context_.entries().wait_get(card_key(rank), Deadline::after(kInterruptPeriod));
    if (!text) continue;
    take_card(rank, *text);
    missing.erase(missing.begin());
  }
}

bool Meeting::take_cards(const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(card_key(rank));
  const auto texts = context_.entries().try_get_all(keys);
  if (!texts) return false;
  for (std::size_t i = 0; i < ranks.size(); ++i) take_card(ranks[i], (*texts)[i]);
  return true;
}

void Meeting::take_card(int rank, const std::string& text) {
  MeetingCard card = MeetingCard::decode(text);
  if (card.rank != rank) {
    throw StoreError(fmt::format("{}: the store's card of rank {} is that of {}.", context_.where(),
                                 rank, card.who()));
  }
  if (const auto failure = find_disagreement(context_.card(rank_), card)) context_.fail(*failure);
  context_.learn(std::move(card));
}

// A rank with a key does not believe this one, and this one would wait for its card in vain.
void Meeting::check_has_no_key(int rank) {
  if (!context_.store().try_get(fmt::format("hail/{}", rank))) return;
  context_.fail(
      {Kind::Peer, rank_, ::getpid(),
       fmt::format("rank {} has a run key, rank {} (pid {}) was given none. Hint: give all "
                   "ranks the same key (LIBDDP_RUN_KEY_FILE, or 'libddp run "
                   "--run-key-file' on every host).",
                   rank, rank_, ::getpid())});
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
  const std::string hello = MeetingHello{rank_, context_.card(rank_).token, theirs.token}.encode();
  talk_to(lower_rank, [&] { send_frame(control.get(), hello, descriptors_, context_.deadline()); });
  // It cannot finish without this hello, but may finish at any time after it.
  context_.reached(lower_rank);
  peer(lower_rank).control = std::move(control);
}

// Only a process of this user that has read both cards is let in. Anyone else is no reason to fail:
// the ranks that are missing still come.
void Meeting::take_hello(UnixGuest& guest) {
  MeetingHello hello;
  try {
    hello = MeetingHello::decode(guest.hello.bytes);
  } catch (const StoreError& error) {
    return door_.refuse(error.what());
  }
  const int rank = hello.rank;
  if (rank <= rank_ || rank >= context_.options().world_size || !is_local(rank) ||
      context_.is_linked(rank) || hello.own_token != context_.card(rank).token ||
      hello.their_token != context_.card(rank_).token) {
    return door_.refuse("wrong rank or token");
  }
  talk_to(rank, [&] {
    send_frame(guest.socket.get(), context_.card(rank_).token, descriptors_, context_.deadline());
  });
  context_.reached(rank);
  context_.linked(rank);
  peer(rank).control = std::move(guest.socket);
  peer(rank).descriptors = std::move(guest.hello.descriptors);
}

void Meeting::read_answer(int lower_rank) {
  const int socket = peer(lower_rank).control.get();
  while (!wait_readable(socket, kInterruptPeriod)) context_.look_around();
  Frame frame = talk_to(
      lower_rank, [&] { return receive_frame(socket, UnixDoor::kLimits, context_.deadline()); });
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
